/* An ordinary program of TCP sockets: epoll(7), signal masks, duplicates. multiplexed [WHAT], a function below; it
 * succeeds with the kernel's sockets, too. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "checks.h"

static struct sockaddr_in address;
static int listener, client, server, epoll;

static void listen_anywhere(void) {
    socklen_t length = sizeof address;
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(listener >= 0 && !bind(listener, (struct sockaddr *)&address, sizeof address) && !listen(listener, 5));
    CHECK(!getsockname(listener, (struct sockaddr *)&address, &length));
}

static void *connect_one(void *unused) {
    client = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(client >= 0 && !connect(client, (struct sockaddr *)&address, sizeof address));
    return unused;
}

static void make_pair(void) {
    pthread_t thread;
    listen_anywhere();
    CHECK(!pthread_create(&thread, NULL, connect_one, NULL));
    server = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    CHECK(server >= 0 && !pthread_join(thread, NULL));
    epoll = epoll_create1(EPOLL_CLOEXEC);
    CHECK(epoll >= 0);
}

static void close_all(void) { CHECK(!close(client) && !close(server) && !close(listener) && !close(epoll)); }

static int control(int operation, int fd, uint32_t events) {
    struct epoll_event event = {.events = events, .data.fd = fd};
    return epoll_ctl(epoll, operation, fd, &event);
}

/* The events of one descriptor, which has some; 0: after `timeout` none has any. */
static uint32_t told(int fd, int timeout) {
    struct epoll_event events[4];
    int found = epoll_wait(epoll, events, 4, timeout);
    CHECK(found == 0 || (found == 1 && events[0].data.fd == fd));
    return found ? events[0].events : 0;
}

static void send_to(int fd, size_t size) {
    char data[1000] = {0};
    CHECK(send(fd, data, size, 0) == (ssize_t)size);
}

static void take(int fd, size_t size) {
    char data[1000];
    CHECK(recv(fd, data, size, MSG_WAITALL) == (ssize_t)size);
}

static void flags(void) {
    make_pair();
    CHECK(fcntl(server, F_GETFL) & O_NONBLOCK && fcntl(server, F_GETFD) == FD_CLOEXEC);
    CHECK(!(fcntl(client, F_GETFL) & O_NONBLOCK));
    FAILS(accept4(listener, NULL, NULL, 1), EINVAL);
    pthread_t thread; /* a listener by another number than its first one */
    int other = dup(listener);
    CHECK(other >= 0 && !close(listener) && !close(client) && !close(server));
    listener = other;
    CHECK(!pthread_create(&thread, NULL, connect_one, NULL));
    CHECK((server = accept(listener, NULL, NULL)) >= 0 && !pthread_join(thread, NULL));
    close_all();
}

static void level(void) {
    make_pair();
    CHECK(!control(EPOLL_CTL_ADD, server, EPOLLIN));
    FAILS(control(EPOLL_CTL_ADD, server, EPOLLIN), EEXIST);
    FAILS(control(EPOLL_CTL_MOD, client, EPOLLIN), ENOENT);
    FAILS(control(EPOLL_CTL_DEL, client, EPOLLIN), ENOENT);
    FAILS(epoll_ctl(epoll, EPOLL_CTL_MOD, server, NULL), EFAULT);
    FAILS(epoll_ctl(client, EPOLL_CTL_ADD, server, &(struct epoll_event){0}), EINVAL);
    FAILS(epoll_wait(epoll, NULL, 0, 0), EINVAL);
    CHECK(!told(server, 0) && !told(server, 1));
    send_to(client, 2);
    CHECK(told(server, -1) == EPOLLIN && told(server, -1) == EPOLLIN);
    take(server, 1);
    CHECK(told(server, -1) == EPOLLIN);
    take(server, 1);
    CHECK(!told(server, 0));
    CHECK(!control(EPOLL_CTL_MOD, server, EPOLLIN | EPOLLOUT) && told(server, -1) == EPOLLOUT);
    CHECK(!control(EPOLL_CTL_DEL, server, 0) && !told(server, 0));
    close_all();
}

/* Each arrival is told once; writable again, once. */
static void edge(void) {
    static char data[100000];
    make_pair();
    CHECK(!control(EPOLL_CTL_ADD, server, EPOLLIN | EPOLLOUT | EPOLLET));
    CHECK(told(server, -1) == EPOLLOUT && !told(server, 0));
    send_to(client, 1);
    CHECK(told(server, -1) == (EPOLLIN | EPOLLOUT) && !told(server, 0));
    send_to(client, 1);
    CHECK(told(server, -1) == (EPOLLIN | EPOLLOUT) && !told(server, 0));
    take(server, 2);
    CHECK(!told(server, 0));
    size_t sent = 0, taken = 0;
    for (ssize_t size; (size = send(server, data, sizeof data, 0)) > 0;)
        sent += (size_t)size;
    CHECK(errno == EAGAIN);
    while (taken < sent) {
        ssize_t size = recv(client, data, sizeof data, 0);
        CHECK(size > 0);
        taken += (size_t)size;
    }
    CHECK(told(server, -1) == EPOLLOUT);
    CHECK(!control(EPOLL_CTL_MOD, server, EPOLLOUT | EPOLLET) && told(server, -1) == EPOLLOUT);
    close_all();
}

static void once(void) {
    make_pair();
    CHECK(!control(EPOLL_CTL_ADD, server, EPOLLIN | EPOLLONESHOT));
    send_to(client, 1);
    CHECK(told(server, -1) == EPOLLIN);
    send_to(client, 1);
    CHECK(!told(server, 1) && !control(EPOLL_CTL_MOD, server, EPOLLIN | EPOLLONESHOT));
    CHECK(told(server, -1) == EPOLLIN && !told(server, 0));
    CHECK(!shutdown(client, SHUT_WR) && !told(server, 1));
    close_all();
}

/* The peer closes a half, then all. */
static void ends(void) {
    char byte;
    make_pair();
    send_to(client, 1);
    CHECK(!shutdown(client, SHUT_WR) && !control(EPOLL_CTL_ADD, server, EPOLLRDHUP));
    CHECK(told(server, -1) == EPOLLRDHUP && told(server, 0) == EPOLLRDHUP);
    CHECK(!control(EPOLL_CTL_MOD, server, EPOLLIN | EPOLLRDHUP) && told(server, -1) == (EPOLLIN | EPOLLRDHUP));
    struct pollfd poll_fd = {.fd = server, .events = POLLRDHUP};
    CHECK(poll(&poll_fd, 1, -1) == 1 && poll_fd.revents == POLLRDHUP);
    take(server, 1);
    CHECK(!recv(server, &byte, 1, 0));
    CHECK(!shutdown(server, SHUT_WR) && !control(EPOLL_CTL_MOD, server, EPOLLET));
    CHECK(told(server, -1) == EPOLLHUP && !told(server, 0));
    close_all();
}

/* Nobody listens. */
static void refused(void) {
    int error;
    socklen_t length = sizeof error;
    listen_anywhere();
    CHECK(!close(listener) && (epoll = epoll_create(1)) >= 0);
    client = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    int result = connect(client, (struct sockaddr *)&address, sizeof address);
    CHECK(result < 0 && !control(EPOLL_CTL_ADD, client, EPOLLOUT));
    if (errno == EINPROGRESS) {
        CHECK(told(client, -1) & EPOLLERR);
        CHECK(!getsockopt(client, SOL_SOCKET, SO_ERROR, &error, &length) && error == ECONNREFUSED);
    }
    CHECK(!close(client) && !close(epoll));
}

/* Sockets that connect, listen, and are closed; ordinary descriptors besides. */
static void several(void) {
    struct epoll_event events[4];
    int ends[2], found;
    listen_anywhere();
    CHECK((epoll = epoll_create1(0)) >= 0 && !pipe(ends));
    CHECK(!fcntl(listener, F_SETFL, O_NONBLOCK));
    CHECK(!control(EPOLL_CTL_ADD, listener, EPOLLIN | EPOLLEXCLUSIVE) && !control(EPOLL_CTL_ADD, ends[0], EPOLLIN));
    FAILS(control(EPOLL_CTL_MOD, listener, EPOLLIN), EINVAL);
    FAILS(accept(listener, NULL, NULL), EAGAIN);
    client = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    CHECK(!control(EPOLL_CTL_ADD, client, EPOLLONESHOT));
    CHECK(!connect(client, (struct sockaddr *)&address, sizeof address) || errno == EINPROGRESS);
    CHECK(!control(EPOLL_CTL_MOD, client, EPOLLOUT | EPOLLET));
    for (bool is_accepted = false, is_connected = false; !is_accepted || !is_connected;) {
        found = epoll_wait(epoll, events, 1, -1);
        CHECK(found == 1);
        if (events[0].data.fd == client) {
            is_connected = events[0].events & EPOLLOUT;
        } else {
            CHECK(events[0].data.fd == listener && events[0].events == EPOLLIN);
            server = accept(listener, NULL, NULL);
            CHECK((server >= 0) != is_accepted && (server >= 0 || errno == EAGAIN));
            is_accepted = true;
        }
    }
    CHECK(!told(listener, 0) && !control(EPOLL_CTL_ADD, server, EPOLLIN));
    CHECK(write(ends[1], "x", 1) == 1 && told(ends[0], -1) == EPOLLIN);
    send_to(client, 1);
    while ((found = epoll_wait(epoll, events, 4, -1)) == 1)
        CHECK(events[0].data.fd == ends[0]);
    CHECK(found == 2 && events[0].data.fd != events[1].data.fd);
    for (int seen = 0; seen != 3;) { /* none is left out where there is room for one */
        CHECK(epoll_wait(epoll, events, 1, -1) == 1);
        seen |= events[0].data.fd == server ? 1 : 2;
    }
    struct pollfd outer = {.fd = epoll, .events = POLLIN};
    int before = epoll;
    CHECK(poll(&outer, 1, -1) == 1 && !close(ends[1]) && !close(ends[0]));
    CHECK((epoll = epoll_create1(0)) >= 0 && !control(EPOLL_CTL_ADD, before, EPOLLIN) && told(before, -1) == EPOLLIN);
    CHECK(!close(epoll));
    epoll = before;
    CHECK(told(server, -1) == EPOLLIN && !close(server) && told(client, -1));
    CHECK(!close(client) && !told(client, 0)); /* closed, so it is there no more */
    CHECK(!close(listener) && !close(epoll));
    FAILS(epoll_wait(epoll, events, 1, 0), EBADF);
}

static void duplicates(void) {
    char byte;
    make_pair();
    int other = dup(server), third = fcntl(server, F_DUPFD_CLOEXEC, 100), fourth = dup2(client, 90);
    CHECK(other >= 0 && third >= 100 && fcntl(third, F_GETFD) == FD_CLOEXEC && fourth == 90);
    CHECK(!control(EPOLL_CTL_ADD, server, EPOLLIN) && !control(EPOLL_CTL_ADD, other, EPOLLIN | EPOLLET));
    send_to(fourth, 2);
    struct epoll_event events[4];
    int seen = 0;
    while (seen != 3)
        for (int found = epoll_wait(epoll, events, 4, -1); found > 0; found--)
            seen |= events[found - 1].data.fd == other ? 1 : 2;
    CHECK(!close(server));
    FAILS(recv(server, &byte, 1, 0), EBADF);
    CHECK(open("/dev/null", O_RDONLY) == server && !close(server)); /* the number is free */
    take(third, 1);
    CHECK(!control(EPOLL_CTL_DEL, other, 0) && !control(EPOLL_CTL_ADD, other, EPOLLIN | EPOLLONESHOT));
    take(other, 1);
    FAILS(recv(other, &byte, 1, MSG_DONTWAIT), EAGAIN);
    CHECK(!close(client) && dup2(third, listener) == listener && !close(third)); /* the listener is closed */
    send_to(fourth, 1);
    take(other, 1);
    CHECK(!close(fourth) && !recv(listener, &byte, 1, MSG_WAITALL)); /* the peer has closed the last one */
    FAILS(dup3(other, other, 0), EINVAL);
    FAILS(dup2(12345, other), EBADF);
    CHECK(dup2(epoll, 80) == 80 && !close(epoll));
    epoll = 80;
    CHECK(epoll_wait(epoll, events, 4, -1) >= 1);
    CHECK(!close(listener) && !close(other) && !close(epoll));
}

/* Calls that wait no longer than they may; what is without effect. */
static void options(void) {
    struct timeval time = {0, 1000}, got;
    socklen_t length = sizeof got;
    int on = 1;
    char byte;
    make_pair();
    CHECK(!setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time));
    CHECK(!getsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &got, &length) && length == sizeof got && !got.tv_sec);
    FAILS(recv(client, &byte, 1, 0), EAGAIN);
    CHECK(!setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time));
    FAILS(accept(listener, NULL, NULL), EAGAIN);
    CHECK(!setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time));
    while (send(client, &time, sizeof time, 0) > 0) {
    }
    CHECK(errno == EAGAIN);
    CHECK(!setsockopt(client, IPPROTO_TCP, TCP_CORK, &on, sizeof on));
    FAILS(setsockopt(client, SOL_SOCKET, 12345, &on, sizeof on), ENOPROTOOPT);
    time.tv_usec = -1;
    FAILS(setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time), EDOM);
    CHECK(recv(server, &byte, 1, 0) == 1);
    close_all();
}

/* Several messages in a call; what is unread. */
static void messages(void) {
    char one[4], two[4];
    int unread = 0;
    struct iovec from[2] = {{"abc", 3}, {"def", 3}}, to[2] = {{one, 4}, {two, 4}};
    struct mmsghdr sent[2] = {{.msg_hdr = {.msg_iov = &from[0], .msg_iovlen = 1}},
                              {.msg_hdr = {.msg_iov = &from[1], .msg_iovlen = 1}}};
    struct mmsghdr taken[2] = {{.msg_hdr = {.msg_iov = &to[0], .msg_iovlen = 1}},
                               {.msg_hdr = {.msg_iov = &to[1], .msg_iovlen = 1}}};
    make_pair();
    FAILS(recvmmsg(server, taken, 2, 0, NULL), EAGAIN);
    CHECK(sendmmsg(client, sent, 2, 0) == 2 && sent[0].msg_len == 3 && sent[1].msg_len == 3);
    while (unread < 6)
        CHECK(!ioctl(server, FIONREAD, &unread));
    CHECK(unread == 6 && recvmmsg(server, taken, 2, MSG_WAITFORONE, NULL) == 2);
    CHECK(taken[0].msg_len == 4 && taken[1].msg_len == 2 && !memcmp(one, "abcd", 4) && !memcmp(two, "ef", 2));
    int off = 0;
    send_to(client, 1);
    CHECK(!ioctl(server, FIONBIO, &off) && recvmmsg(server, taken, 2, MSG_WAITFORONE, NULL) == 1);
    close_all();
}

static volatile sig_atomic_t caught;
static void count(int unused) { (void)unused, caught++; }

/* A signal that arrives while calls wait, and not before. */
static void masks(void) {
    sigset_t blocked, none;
    struct sigaction action = {.sa_handler = count};
    struct timespec at_once = {0, 0};
    fd_set set;
    make_pair();
    sigemptyset(&none);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    CHECK(!sigaction(SIGUSR1, &action, NULL) && !sigprocmask(SIG_BLOCK, &blocked, NULL));
    CHECK(!control(EPOLL_CTL_ADD, server, EPOLLIN));
    struct epoll_event event;
    struct pollfd fds = {.fd = server, .events = POLLIN};
    FD_ZERO(&set);
    FD_SET(server, &set);
    CHECK(!raise(SIGUSR1) && !ppoll(&fds, 1, &at_once, NULL) && !caught);
    FAILS(ppoll(&fds, 1, NULL, &none), EINTR);
    CHECK(caught == 1 && !raise(SIGUSR1));
    FAILS(pselect(server + 1, &set, NULL, NULL, NULL, &none), EINTR);
    CHECK(caught == 2 && !raise(SIGUSR1));
    FAILS(epoll_pwait(epoll, &event, 1, -1, &none), EINTR);
    CHECK(caught == 3 && !raise(SIGUSR1) && !epoll_pwait(epoll, &event, 1, 0, NULL) && caught == 3);
    CHECK(!pselect(server + 1, &set, NULL, NULL, &at_once, NULL) && !FD_ISSET(server, &set));
    send_to(client, 1);
    FD_SET(server, &set);
    CHECK(pselect(server + 1, &set, NULL, NULL, NULL, NULL) == 1 && FD_ISSET(server, &set) && caught == 3);
    close_all();
}

enum { ROUNDS = 300 };

/* Takes what one epoll of two threads tells it, each message once. */
static void *take_some(void *count) {
    struct epoll_event event;
    char byte;
    for (;;) {
        CHECK(epoll_wait(epoll, &event, 1, -1) == 1);
        if (event.data.fd != server)
            return NULL;
        if (recv(server, &byte, 1, 0) == 1)
            __atomic_add_fetch((int *)count, 1, __ATOMIC_SEQ_CST);
        CHECK(!control(EPOLL_CTL_MOD, server, EPOLLIN | EPOLLONESHOT));
        if (__atomic_load_n((int *)count, __ATOMIC_SEQ_CST) == ROUNDS)
            return NULL;
        send_to(server, 1);
    }
}

static void threads(void) {
    pthread_t both[2];
    int ends[2], taken = 0;
    make_pair();
    CHECK(!pipe(ends) && !control(EPOLL_CTL_ADD, ends[0], EPOLLIN));
    CHECK(!control(EPOLL_CTL_ADD, server, EPOLLIN | EPOLLONESHOT));
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_create(&both[i], NULL, take_some, &taken));
    for (int i = 0; i < ROUNDS; i++) {
        send_to(client, 1);
        if (i < ROUNDS - 1)
            take(client, 1);
    }
    while (__atomic_load_n(&taken, __ATOMIC_SEQ_CST) < ROUNDS)
        sched_yield();
    CHECK(write(ends[1], "x", 1) == 1);
    for (int i = 0; i < 2; i++)
        CHECK(!pthread_join(both[i], NULL));
    CHECK(taken == ROUNDS && !close(ends[0]) && !close(ends[1]));
    close_all();
}

/* What a child closes stays open here; its own work as any. */
static void children(void) {
    int status;
    make_pair();
    CHECK(!control(EPOLL_CTL_ADD, server, EPOLLIN));
    pid_t child = fork();
    if (!child) {
        close_all();
        FAILS(recv(server, &status, 1, 0), EBADF);
        make_pair();
        send_to(client, 1);
        CHECK(!control(EPOLL_CTL_ADD, server, EPOLLIN) && told(server, -1) == EPOLLIN);
        close_all();
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && !status);
    child = vfork();
    if (!child) {
        close(server);
        dup2(client, 1);
        dup2(1, listener);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && !status && !fcntl(listener, F_SETFL, O_NONBLOCK));
    FAILS(accept(listener, NULL, NULL), EAGAIN);
    send_to(client, 1);
    CHECK(told(server, -1) == EPOLLIN);
    take(server, 1);
    close_all();
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*function)(void);
    } all[] = {{"flags", flags},           {"level", level},       {"edge", edge},       {"once", once},
               {"ends", ends},             {"refused", refused},   {"several", several}, {"duplicates", duplicates},
               {"messages", messages},     {"options", options},   {"masks", masks},       {"threads", threads}, {"children", children}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (argc < 2 || !strcmp(argv[1], all[i].name))
            all[i].function();
    puts("done");
    return 0;
}
