/* What programs do with rsocket(7): sockets WHAT, a function below. Each prints "done". */
#define _GNU_SOURCE
#include <rdma/rdma_verbs.h>
#include <rdma/rsocket.h>

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "checks.h"

static struct sockaddr_in address;
static int listener, client, server;

static int make_socket(void) {
    int fd = rsocket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    return fd;
}

static void listen_anywhere(void) {
    socklen_t length = sizeof address;
    address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    listener = make_socket();
    CHECK(!rbind(listener, (struct sockaddr *)&address, sizeof address) && !rlisten(listener, 5));
    CHECK(!rgetsockname(listener, (struct sockaddr *)&address, &length) && address.sin_port);
}

static void *accept_one(void *unused) {
    struct sockaddr_in peer;
    socklen_t length = sizeof peer;
    server = raccept(listener, (struct sockaddr *)&peer, &length);
    CHECK(server >= 0 && length == sizeof peer && peer.sin_addr.s_addr == htonl(INADDR_LOOPBACK));
    return unused;
}

static void connect_both(void) {
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, accept_one, NULL));
    CHECK(!rconnect(client, (struct sockaddr *)&address, sizeof address));
    CHECK(!pthread_join(thread, NULL));
}

static void make_pair(void) {
    listen_anywhere();
    client = make_socket();
    connect_both();
}

static void close_all(void) {
    CHECK(!rclose(client) && !rclose(server) && !rclose(listener));
    FAILS(rclose(client), EBADF);
}

/* All vectors are filled; flags of calls. */
static void vectors(void) {
    char one[3], two[100], all[11];
    struct iovec from[2] = {{"hello ", 6}, {"world", 5}}, to[2] = {{one, 3}, {two, 100}};
    struct msghdr message = {.msg_iov = to, .msg_iovlen = 2};
    make_pair();
    FAILS(rrecv(server, one, 1, MSG_DONTWAIT), EAGAIN);
    CHECK(rwritev(client, from, 2) == 11);
    CHECK(rrecv(server, all, 11, MSG_WAITALL | MSG_PEEK) > 0);
    CHECK(rrecv(server, all, 11, MSG_WAITALL) == 11 && !memcmp(all, "hello world", 11));
    CHECK(rsend(client, "hello world", 11, 0) == 11);
    CHECK(rrecv(server, all, 11, MSG_PEEK) == 11);
    CHECK(rreadv(server, to, 2) == 11 && !memcmp(one, "hel", 3) && !memcmp(two, "lo world", 8));
    CHECK(rsend(server, "hello world", 11, 0) == 11);
    CHECK(rrecvmsg(client, &message, 0) == 11 && !memcmp(two, "lo world", 8));
    CHECK(!rsend(client, "", 0, 0) && !rread(server, all, 0));
    FAILS(rsendto(client, "x", 1, 0, (struct sockaddr *)&address, sizeof address), EISCONN);
    close_all();
}

/* One half is closed, then the other. */
static void ends(void) {
    char data[10];
    make_pair();
    CHECK(rsend(client, "last", 4, 0) == 4 && !rshutdown(client, SHUT_WR));
    FAILS(rsend(client, "x", 1, 0), EPIPE);
    CHECK(rrecv(server, data, 10, MSG_WAITALL) == 4 && !rrecv(server, data, 10, 0));
    CHECK(rsend(server, "answer", 6, 0) == 6 && !rclose(server));
    CHECK(rrecv(client, data, 10, MSG_WAITALL) == 6 && !rrecv(client, data, 10, 0));
    struct pollfd poll = {.fd = client, .events = POLLIN | POLLOUT};
    CHECK(rpoll(&poll, 1, -1) == 1 && poll.revents == (POLLIN | POLLOUT | POLLHUP));
    CHECK(!rclose(client) && !rclose(listener));
}

/* Nobody listens. */
static void refused(void) {
    int error, value = 1;
    socklen_t length = sizeof error;
    listen_anywhere();
    CHECK(!rclose(listener));
    client = make_socket();
    FAILS(rsend(client, "x", 1, 0), ENOTCONN);
    FAILS(rconnect(client, (struct sockaddr *)&address, sizeof address), ECONNREFUSED);
    CHECK(!rclose(client));
    client = rsocket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    CHECK(rconnect(client, (struct sockaddr *)&address, sizeof address) == -1);
    bool is_told = errno == ECONNREFUSED; /* at once */
    CHECK(is_told || errno == EINPROGRESS);
    struct pollfd poll = {.fd = client, .events = POLLOUT};
    CHECK(rpoll(&poll, 1, -1) == 1 && poll.revents & POLLERR);
    CHECK(!rgetsockopt(client, SOL_SOCKET, SO_ERROR, &error, &length) && error == (is_told ? 0 : ECONNREFUSED));
    CHECK(!rclose(client));
    FAILS(rsocket(AF_UNIX, SOCK_STREAM, 0), EAFNOSUPPORT);
    FAILS(rsetsockopt(client, SOL_SOCKET, SO_RCVBUF, &value, sizeof value), EBADF);
}

static int pipe_ends[2];

static void *write_later(void *unused) {
    char byte;
    CHECK(read(pipe_ends[0], &byte, 1) == 1); /* the other thread is about to wait */
    CHECK(rsend(client, "x", 1, 0) == 1);
    return unused;
}

/* Sockets and ordinary descriptors together; connecting without waiting. */
static void several(void) {
    char byte;
    pthread_t thread;
    fd_set reading;
    CHECK(!pipe(pipe_ends));
    listen_anywhere();
    client = make_socket();
    CHECK(!rfcntl(client, F_SETFL, O_NONBLOCK) && rfcntl(client, F_GETFL, 0) & O_NONBLOCK);
    CHECK(!rconnect(client, (struct sockaddr *)&address, sizeof address) || errno == EINPROGRESS);
    struct pollfd fds[3] = {{.fd = client, .events = POLLOUT}, {.fd = listener, .events = POLLIN},
                            {.fd = pipe_ends[0], .events = POLLIN}};
    while (!(fds[1].revents & POLLIN))
        CHECK(rpoll(fds, 3, -1) > 0);
    accept_one(NULL);
    fds[1].fd = server;
    fds[0].revents = 0;
    while (!(fds[0].revents & POLLOUT))
        CHECK(rpoll(fds, 3, -1) > 0);
    CHECK(!rconnect(client, (struct sockaddr *)&address, sizeof address) || errno == EISCONN);
    CHECK(!rfcntl(client, F_SETFL, 0));
    fds[0].events = POLLIN;
    CHECK(rpoll(fds, 3, 0) == 0 && rpoll(fds, 3, 1) == 0);
    CHECK(!pthread_create(&thread, NULL, write_later, NULL));
    CHECK(write(pipe_ends[1], "x", 1) == 1);
    fds[2].fd = -1;
    CHECK(rpoll(fds, 3, -1) == 1 && fds[1].revents == POLLIN);
    CHECK(!pthread_join(thread, NULL));
    CHECK(rread(server, &byte, 1) == 1);
    CHECK(write(pipe_ends[1], "x", 1) == 1);
    FD_ZERO(&reading);
    FD_SET(server, &reading);
    FD_SET(pipe_ends[0], &reading);
    int highest = server > pipe_ends[0] ? server : pipe_ends[0];
    CHECK(rselect(highest + 1, &reading, NULL, NULL, NULL) == 1);
    CHECK(FD_ISSET(pipe_ends[0], &reading) && !FD_ISSET(server, &reading));
    close_all();
}

enum { STREAM = 3000000 };

static void *send_all(void *fd) {
    static __thread uint8_t part[70000];
    for (size_t sent = 0, size; sent < STREAM; sent += size) {
        size = 1 + sent * 7919 % sizeof part;
        if (size > STREAM - sent)
            size = STREAM - sent;
        for (size_t i = 0; i < size; i++)
            part[i] = (uint8_t)((sent + i) * 31 >> 3);
        CHECK(rsend((int)(intptr_t)fd, part, size, 0) == (ssize_t)size);
    }
    return NULL;
}

static void *receive_all(void *fd) {
    static __thread uint8_t part[50000];
    ssize_t size;
    for (size_t received = 0; received < STREAM; received += (size_t)size) {
        size = rrecv((int)(intptr_t)fd, part, sizeof part, 0);
        CHECK(size > 0);
        for (size_t i = 0; i < (size_t)size; i++)
            CHECK(part[i] == (uint8_t)((received + i) * 31 >> 3));
    }
    return NULL;
}

/* Two threads for each end, in both directions at once. */
static void duplex(void) {
    pthread_t threads[4];
    make_pair();
    for (int i = 0; i < 4; i++) {
        void *fd = (void *)(intptr_t)(i % 2 ? client : server);
        CHECK(!pthread_create(&threads[i], NULL, i < 2 ? send_all : receive_all, fd));
    }
    for (int i = 0; i < 4; i++)
        CHECK(!pthread_join(threads[i], NULL));
    close_all();
}

/* Memory that the peer writes by its offset. */
static void mapped(void) {
    static char memory[100000], data[sizeof memory];
    int size = 4;
    char byte;
    listen_anywhere();
    client = make_socket();
    CHECK(!rsetsockopt(client, SOL_RDMA, RDMA_IOMAPSIZE, &size, sizeof size));
    connect_both();
    FAILS((ssize_t)riowrite(client, data, 10, 5000, 0), EFAULT);
    CHECK(riomap(server, memory, sizeof memory, PROT_WRITE, 0, 5000) == 5000);
    CHECK(rsend(server, "x", 1, 0) == 1 && rrecv(client, &byte, 1, 0) == 1);
    memset(data, 'm', sizeof data);
    CHECK(riowrite(client, data, sizeof data, 5000, 0) == sizeof data);
    CHECK(rsend(client, "x", 1, 0) == 1 && rrecv(server, &byte, 1, 0) == 1);
    CHECK(!memcmp(memory, data, sizeof memory));
    CHECK(!riounmap(server, memory, sizeof memory));
    FAILS(riounmap(server, memory, sizeof memory), EINVAL);
    FAILS(riomap(client, memory, 10, PROT_WRITE, 0, -1), ENOSPC); /* the peer has no table */
    close_all();
}

static void options(void) {
    static const int kept[][3] = {{SOL_SOCKET, SO_SNDBUF, 5000},     {SOL_SOCKET, SO_RCVBUF, 6000},
                                  {SOL_SOCKET, SO_KEEPALIVE, 1},     {SOL_SOCKET, SO_REUSEADDR, 1},
                                  {IPPROTO_TCP, TCP_NODELAY, 0},     {IPPROTO_TCP, TCP_KEEPIDLE, 100},
                                  {IPPROTO_TCP, TCP_KEEPINTVL, 50},  {IPPROTO_TCP, TCP_KEEPCNT, 4},
                                  {IPPROTO_TCP, TCP_MAXSEG, 2048},
                                  {SOL_RDMA, RDMA_SQSIZE, 20},       {SOL_RDMA, RDMA_RQSIZE, 30},
                                  {SOL_RDMA, RDMA_INLINE, 0},        {SOL_RDMA, RDMA_IOMAPSIZE, 3}};
    struct linger linger = {1, 0};
    int value;
    socklen_t length = sizeof value;
    listen_anywhere();
    client = make_socket();
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        const int *each = kept[i];
        CHECK(!rsetsockopt(client, each[0], each[1], &each[2], sizeof each[2]));
        CHECK(!rgetsockopt(client, each[0], each[1], &value, &length) && value == each[2]);
    }
    FAILS(rsetsockopt(client, SOL_SOCKET, 12345, &value, sizeof value), ENOPROTOOPT);
    CHECK(!rsetsockopt(client, SOL_SOCKET, SO_LINGER, &linger, sizeof linger));
    connect_both();
    FAILS(rsetsockopt(client, SOL_SOCKET, SO_RCVBUF, &kept[0][2], sizeof value), EINVAL);
    pthread_t thread; /* small rings and queues */
    CHECK(!pthread_create(&thread, NULL, send_all, (void *)(intptr_t)client));
    receive_all((void *)(intptr_t)server);
    CHECK(!pthread_join(thread, NULL));
    close_all();
}

/* A peer that is killed. */
static void killed(void) {
    int ready[2];
    char byte;
    CHECK(!pipe(ready));
    pid_t child = fork();
    if (!child) {
        listen_anywhere();
        CHECK(write(ready[1], &address, sizeof address) == sizeof address);
        accept_one(NULL);
        CHECK(rsend(server, "x", 1, 0) == 1);
        for (;;)
            pause();
    }
    CHECK(read(ready[0], &address, sizeof address) == sizeof address);
    client = make_socket();
    CHECK(!rconnect(client, (struct sockaddr *)&address, sizeof address) && rrecv(client, &byte, 1, 0) == 1);
    CHECK(!kill(child, SIGKILL) && waitpid(child, NULL, 0) == child);
    FAILS(rrecv(client, &byte, 1, 0), ECONNRESET);
    CHECK(!rclose(client));
}

static void put(uint8_t *bytes, uint64_t value, int size) {
    for (int i = 0; i < size; i++)
        bytes[i] = (uint8_t)(value >> 8 * (size - 1 - i));
}

/* A peer that speaks the protocol by hand: connected with a version of it, or NULL. */
static struct rdma_cm_id *connect_by_hand(uint8_t version) {
    static uint8_t memory[64];
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP}, *info;
    struct ibv_qp_init_attr attributes = {.cap = {4, 4, 1, 1, 0}, .sq_sig_all = 1};
    uint8_t data[40] = {version, 2, 0, 64};
    struct rdma_conn_param param = {.private_data = data, .private_data_len = sizeof data, .retry_count = 7,
                                    .rnr_retry_count = 7};
    struct rdma_cm_id *id;
    char port[8];
    sprintf(port, "%d", ntohs(address.sin_port));
    CHECK(!rdma_getaddrinfo("127.0.0.1", port, &hints, &info) && !rdma_create_ep(&id, info, NULL, &attributes));
    struct ibv_mr *mr = rdma_reg_write(id, memory, sizeof memory);
    CHECK(mr);
    put(data + 8, (uintptr_t)memory, 8);
    put(data + 16, mr->rkey, 4);
    put(data + 20, 2, 4); /* entries for targets */
    for (int i = 0; i < 4; i++)
        CHECK(!rdma_post_recvv(id, NULL, NULL, 0));
    return rdma_connect(id, &param) ? NULL : id;
}

static void post_immediate(struct rdma_cm_id *id, uint32_t immediate) {
    struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .imm_data = htonl(immediate)}, *bad;
    CHECK(!ibv_post_send(id->qp, &wr, &bad));
}

/* Peers that break the protocol. */
static void hostile(void) {
    static const uint32_t immediates[] = {1u << 29,          7u << 29 | 3,  6u << 29,
                                          0u << 29 | 200000, 4u << 29 | 65, 7u << 29 | 2};
    pthread_t thread;
    char byte;
    listen_anywhere();
    for (size_t i = 0; i < sizeof immediates / sizeof *immediates; i++) {
        CHECK(!pthread_create(&thread, NULL, accept_one, NULL));
        CHECK(!connect_by_hand(2) && errno == ECONNREFUSED); /* of another version */
        struct rdma_cm_id *id = connect_by_hand(1);
        CHECK(id && !pthread_join(thread, NULL));
        post_immediate(id, immediates[i]);
        if (i < sizeof immediates / sizeof *immediates - 1)
            FAILS(rrecv(server, &byte, 1, 0), ECONNRESET);
        else
            CHECK(!rrecv(server, &byte, 1, 0)); /* an honest one: the end of its stream */
        CHECK(!rclose(server));
        rdma_disconnect(id);
    }
    CHECK(!rclose(listener));
}

static int open_descriptors(void) {
    int count = 0;
    DIR *directory = opendir("/proc/self/fd");
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

/* Nothing is left of closed sockets; a child has none of its parent's. */
static void left(void) {
    int before = 0;
    for (int i = 0; i < 20; i++) {
        make_pair();
        CHECK(rsend(client, "unread", 6, 0) == 6);
        close_all();
        if (!i)
            before = open_descriptors();
    }
    CHECK(open_descriptors() < before + 10); /* threads, and connections to the server, are few */
    make_pair();
    pid_t child = fork();
    if (!child) {
        FAILS(rsend(client, "x", 1, 0), EBADF);
        make_pair();
        close_all();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && !status);
    close_all();
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*function)(void);
    } all[] = {{"vectors", vectors}, {"ends", ends},     {"refused", refused}, {"several", several}, {"duplex", duplex},
               {"mapped", mapped},   {"options", options}, {"killed", killed}, {"left", left}, {"hostile", hostile}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (argc < 2 || !strcmp(argv[1], all[i].name))
            all[i].function();
    puts("done");
    return 0;
}
