/* What programs do with datagrams of rsocket(7): datagrams WHAT [FAMILY], a function below. Each prints "done". */
#define _GNU_SOURCE
#include <rdma/rsocket.h>

#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "checks.h"

/* Of later versions than the header. */
int repoll_create1(int flags);
int repoll_ctl(int number, int operation, int fd, struct epoll_event *event);
int repoll_wait(int number, struct epoll_event *events, int most, int timeout);
int rioctl(int fd, unsigned long request, ...);

typedef union {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
} Address;

static int family = AF_INET;
static socklen_t address_length;
static Address loopback;
static int one, other;
static Address of_one, of_other;

static int make_socket(void) {
    int fd = rsocket(family, SOCK_DGRAM, 0);
    CHECK(fd >= 0);
    return fd;
}

static Address name_of(int fd) {
    Address name;
    socklen_t length = sizeof name;
    CHECK(!rgetsockname(fd, &name.any, &length) && length == address_length);
    return name;
}

static bool is_same(const Address *first, const Address *second) {
    if (family == AF_INET)
        return first->v4.sin_port == second->v4.sin_port && first->v4.sin_addr.s_addr == second->v4.sin_addr.s_addr;
    return first->v6.sin6_port == second->v6.sin6_port &&
           !memcmp(&first->v6.sin6_addr, &second->v6.sin6_addr, sizeof first->v6.sin6_addr);
}

static int bound(Address *name) {
    int fd = make_socket();
    CHECK(!rbind(fd, &loopback.any, address_length));
    *name = name_of(fd);
    return fd;
}

static void make_pair(void) {
    one = bound(&of_one);
    other = bound(&of_other);
}

static void send_to(int fd, const Address *to, const char *text) {
    CHECK(rsendto(fd, text, strlen(text), 0, &to->any, address_length) == (ssize_t)strlen(text));
}

/* The next datagram is this one. */
static void gets(int fd, const Address *from, const char *text) {
    char data[100];
    Address source = {0};
    socklen_t length = sizeof source;
    CHECK(rrecvfrom(fd, data, sizeof data, 0, &source.any, &length) == (ssize_t)strlen(text));
    CHECK(!memcmp(data, text, strlen(text)) && length == address_length && is_same(&source, from));
}

/* So that both know the queue pair of the other. */
static void meet(void) {
    for (int i = 0; i < 20; i++) {
        send_to(one, &of_other, "ping");
        gets(other, &of_one, "ping");
        send_to(other, &of_one, "pong");
        gets(one, &of_other, "pong");
    }
}

static void close_both(void) {
    CHECK(!rclose(one) && !rclose(other));
    FAILS(rclose(one), EBADF);
}

/* To and fro; vectors, flags, what is cut off, and what is empty. */
static void messages(void) {
    char data[100], head[2], tail[3];
    struct iovec from[2] = {{"hel", 3}, {"lo", 2}}, to[2] = {{head, 2}, {tail, 3}};
    Address source;
    struct msghdr sent = {.msg_name = &of_other, .msg_namelen = address_length, .msg_iov = from, .msg_iovlen = 2};
    struct msghdr got = {.msg_name = &source, .msg_namelen = sizeof source, .msg_iov = to, .msg_iovlen = 2};
    int waiting = 0;
    make_pair();
    meet();
    FAILS(rrecv(one, data, sizeof data, MSG_DONTWAIT), EAGAIN);
    CHECK(rsendmsg(one, &sent, 0) == 5);
    CHECK(rrecvmsg(other, &got, 0) == 5 && !memcmp(head, "he", 2) && !memcmp(tail, "llo", 3));
    CHECK(got.msg_namelen == address_length && is_same(&source, &of_one) && !got.msg_flags);
    send_to(one, &of_other, "longer than that");
    got.msg_namelen = sizeof source;
    CHECK(rrecv(other, data, sizeof data, MSG_PEEK) == 16);
    CHECK(!rioctl(other, FIONREAD, &waiting) && waiting == 16);
    CHECK(rrecvmsg(other, &got, 0) == 5 && got.msg_flags == MSG_TRUNC);
    send_to(one, &of_other, "");
    send_to(one, &of_other, "next");
    gets(other, &of_one, "");
    gets(other, &of_one, "next");
    close_both();
}

/* A connected socket sends to its peer, and hears nobody else. */
static void connected(void) {
    Address of_third, peer;
    socklen_t length = sizeof peer;
    make_pair();
    int third = bound(&of_third), client = make_socket();
    FAILS(rsend(client, "x", 1, 0), EDESTADDRREQ);
    FAILS(rgetpeername(client, &peer.any, &length), ENOTCONN);
    FAILS(rshutdown(client, SHUT_RD), ENOTCONN);
    CHECK(!rconnect(client, &of_one.any, address_length));
    CHECK(!rgetpeername(client, &peer.any, &length) && is_same(&peer, &of_one));
    Address own = name_of(client);
    send_to(third, &own, "from a stranger");
    CHECK(rwrite(client, "hello", 5) == 5);
    gets(one, &own, "hello");
    send_to(one, &own, "answer");
    gets(client, &of_one, "answer");
    CHECK(!rconnect(client, &of_other.any, address_length) && rsend(client, "you", 3, 0) == 3);
    gets(other, &own, "you");
    CHECK(!rshutdown(client, SHUT_WR));
    FAILS(rsend(client, "x", 1, 0), EPIPE);
    CHECK(!rshutdown(client, SHUT_RD) && !rread(client, &peer, 1));
    CHECK(!rclose(client) && !rclose(third));
    close_both();
}

/* The wildcard address: the source is what the route says, and to send to it is to send to this host. */
static void anywhere(void) {
    Address any = {.any.sa_family = (sa_family_t)family}, own, to = {.any.sa_family = (sa_family_t)family};
    one = make_socket();
    CHECK(!rbind(one, &any.any, address_length));
    own = name_of(one);
    to = own;
    other = bound(&of_other);
    send_to(other, &to, "hello");
    Address expected = loopback;
    *(family == AF_INET ? &expected.v4.sin_port : &expected.v6.sin6_port) =
        family == AF_INET ? own.v4.sin_port : own.v6.sin6_port;
    gets(one, &of_other, "hello");
    send_to(one, &of_other, "answer");
    gets(other, &expected, "answer");
    close_both();
}

/* What is refused, and options. */
static void refused(void) {
    char data[4096] = {0};
    int value;
    socklen_t length = sizeof value;
    Address group = {.any.sa_family = (sa_family_t)family}, wrong = {.any.sa_family = AF_UNIX}, peer;
    if (family == AF_INET)
        inet_pton(AF_INET, "224.0.0.9", &group.v4.sin_addr);
    else
        inet_pton(AF_INET6, "ff02::9", &group.v6.sin6_addr);
    make_pair();
    FAILS(rsocket(family, SOCK_DGRAM, IPPROTO_TCP), EPROTONOSUPPORT);
    FAILS(rbind(one, &loopback.any, address_length), EINVAL);
    FAILS(rlisten(one, 1), EOPNOTSUPP);
    socklen_t size = sizeof peer;
    FAILS(raccept(one, &peer.any, &size), EOPNOTSUPP);
    FAILS(rsendto(one, data, sizeof data, 0, &of_other.any, address_length), EMSGSIZE);
    FAILS(rsendto(one, data, 1, 0, &group.any, address_length), EOPNOTSUPP);
    FAILS(rsendto(one, data, 1, 0, &wrong.any, address_length), EAFNOSUPPORT);
    FAILS(rsendto(one, data, 1, MSG_OOB, &of_other.any, address_length), EOPNOTSUPP);
    FAILS(rrecv(one, data, 1, MSG_OOB), EOPNOTSUPP);
    FAILS(riomap(one, data, 1, 1, 0, -1), EOPNOTSUPP);
    int again = make_socket();
    FAILS(rbind(again, &of_one.any, address_length), EADDRINUSE);
    CHECK(!rclose(again));
    CHECK(!rgetsockopt(one, SOL_SOCKET, SO_TYPE, &value, &length) && value == SOCK_DGRAM);
    CHECK(!rgetsockopt(one, SOL_SOCKET, SO_PROTOCOL, &value, &length) && value == IPPROTO_UDP);
    CHECK(!rgetsockopt(one, SOL_SOCKET, SO_ERROR, &value, &length) && !value);
    value = 1 << 16;
    FAILS(rsetsockopt(one, SOL_SOCKET, SO_RCVBUF, &value, sizeof value), EINVAL);
    struct timeval short_time = {.tv_usec = 1000};
    CHECK(!rsetsockopt(one, SOL_SOCKET, SO_RCVTIMEO, &short_time, sizeof short_time));
    FAILS(rrecv(one, data, 1, 0), EAGAIN);
    close_both();
}

static void *send_later(void *unused) {
    send_to(other, &of_one, "wake up");
    return unused;
}

/* rpoll() and an epoll wait for datagrams that come by UDP, and by the queue pair. */
static void several(void) {
    struct epoll_event event = {.events = EPOLLIN, .data.fd = 7}, found;
    pthread_t thread;
    make_pair();
    int epoll = repoll_create1(0);
    CHECK(epoll >= 0 && !repoll_ctl(epoll, EPOLL_CTL_ADD, one, &event));
    struct pollfd both[2] = {{.fd = one, .events = POLLIN}, {.fd = other, .events = POLLIN | POLLOUT}};
    CHECK(rpoll(both, 2, 0) == 1 && !both[0].revents && both[1].revents == POLLOUT);
    both[1].events = POLLIN;
    for (int i = 0; i < 20; i++) {
        CHECK(!pthread_create(&thread, NULL, send_later, NULL));
        if (i & 1)
            CHECK(rpoll(both, 2, -1) == 1 && both[0].revents == POLLIN);
        else
            CHECK(repoll_wait(epoll, &found, 1, -1) == 1 && found.events == EPOLLIN && found.data.fd == 7);
        gets(one, &of_other, "wake up");
        CHECK(!pthread_join(thread, NULL));
        CHECK(!repoll_wait(epoll, &found, 1, 0));
    }
    CHECK(!rclose(epoll));
    close_both();
}

/* What one thread sends and another one receives, on one socket each, arrives in order; more than there are slots. */
enum { MANY = 3000 };

static void *send_many(void *unused) {
    for (uint32_t i = 0; i < MANY; i++) {
        char answer;
        CHECK(rsendto(one, &i, sizeof i, 0, &of_other.any, address_length) == sizeof i);
        if (i % 16 == 15) /* so that none is lost */
            CHECK(rrecv(one, &answer, 1, 0) == 1);
    }
    return unused;
}

static void many(void) {
    pthread_t thread;
    uint32_t number;
    make_pair();
    meet();
    CHECK(!pthread_create(&thread, NULL, send_many, NULL));
    for (uint32_t i = 0; i < MANY; i++) {
        CHECK(rrecv(other, &number, sizeof number, 0) == sizeof number && number == i);
        if (i % 16 == 15)
            CHECK(rsendto(other, "!", 1, 0, &of_one.any, address_length) == 1);
    }
    CHECK(!pthread_join(thread, NULL));
    close_both();
}

/* A peer that was started again has another queue pair. */
static void restarted(void) {
    make_pair();
    meet();
    CHECK(!rclose(other));
    other = make_socket();
    CHECK(!rbind(other, &of_other.any, address_length));
    send_to(other, &of_one, "here again");
    gets(one, &of_other, "here again");
    meet();
    close_both();
}

/* A socket that a thread waits for is closed. */
static void *wait_for_it(void *unused) {
    char data;
    FAILS(rrecv(one, &data, 1, 0), EBADF);
    return unused;
}

static void closed(void) {
    pthread_t thread;
    make_pair();
    CHECK(!pthread_create(&thread, NULL, wait_for_it, NULL));
    usleep(20000);
    CHECK(!rclose(one) && !pthread_join(thread, NULL) && !rclose(other));
}

/* Calls end, and others are heard, while somebody sends what is no message of the protocol, and messages that lie. */
static bool is_flooding;

static void *flood(void *unused) {
    uint8_t bytes[64] = {0x55, 0x55, 0x55, 0x55, family == AF_INET ? 4 : 6, 0, family == AF_INET ? 16 : 28};
    int fd = socket(family, SOCK_DGRAM, 0);
    CHECK(fd >= 0);
    for (unsigned i = 0; __atomic_load_n(&is_flooding, __ATOMIC_RELAXED); i++) {
        memcpy(bytes + 8, &i, sizeof i); /* another queue pair each time */
        bytes[0] = i & 1 ? 0x55 : 0;
        sendto(fd, bytes, sizeof bytes, 0, &of_one.any, address_length);
    }
    close(fd);
    return unused;
}

static void flooded(void) {
    pthread_t thread;
    char data[100];
    make_pair();
    is_flooding = true;
    CHECK(!pthread_create(&thread, NULL, flood, NULL));
    struct pollfd writable = {.fd = one, .events = POLLOUT};
    for (int i = 0; i < 200; i++) {
        CHECK(rrecv(one, data, sizeof data, MSG_DONTWAIT) >= 0 || errno == EAGAIN);
        CHECK(rpoll(&writable, 1, 0) == 1);
        send_to(one, &of_other, "ping");
        gets(other, &of_one, "ping");
    }
    __atomic_store_n(&is_flooding, false, __ATOMIC_RELAXED);
    CHECK(!pthread_join(thread, NULL));
    close_both();
}

int main(int count, char **arguments) {
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {{"messages", messages}, {"connected", connected}, {"anywhere", anywhere}, {"refused", refused},
                 {"several", several},   {"many", many},           {"restarted", restarted}, {"closed", closed},
                 {"flooded", flooded}};
    family = count > 2 && !strcmp(arguments[2], "6") ? AF_INET6 : AF_INET;
    address_length = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    loopback.any.sa_family = (sa_family_t)family;
    if (family == AF_INET)
        loopback.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    else
        loopback.v6.sin6_addr = in6addr_loopback;
    for (size_t i = 0; count > 1 && i < sizeof parts / sizeof *parts; i++)
        if (!strcmp(arguments[1], parts[i].name)) {
            parts[i].run();
            puts("done");
            return 0;
        }
    return 2;
}
