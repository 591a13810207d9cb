/* What programs do besides exchanging messages: life fork|cancel|watch|load|poll. Each prints "done". */
#define _GNU_SOURCE
#include "pair.h"

#include <rdma/rdma_cma.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <unistd.h>

static void write_byte(struct pair *pair, int from, uint8_t byte) {
    struct ibv_sge part = {(uintptr_t)pair->memory, 1, pair->mr->lkey};
    struct ibv_send_wr wr = {.sg_list = &part, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED},
                       *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)pair->memory + 100;
    wr.wr.rdma.rkey = pair->mr->rkey;
    pair->memory[0] = byte;
    CHECK(!ibv_post_send(pair->qps[from], &wr, &bad));
}

static void drain(struct pair *pair) {
    struct ibv_wc wc;
    int found;
    while (!(found = ibv_poll_cq(pair->cq, 1, &wc))) {
    }
    CHECK(found == 1 && wc.status == IBV_WC_SUCCESS);
}

/* A child uses nothing of its parent's; it may use the devices anew. The parent goes on. */
static void test_fork(void) {
    struct ibv_context *context = open_first();
    struct pair pair = make_pair(context);
    struct ibv_xrcd_init_attr named = {.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .oflags = O_CREAT,
                                       .fd = open("/", O_RDONLY)};
    CHECK(ibv_open_xrcd(context, &named));
    named.oflags = 0;
    CHECK(ibv_open_xrcd(context, &named));
    for (int i = 0; i < 3; i++) {
        write_byte(&pair, 0, (uint8_t)i);
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            struct pair own = make_pair(open_first());
            write_byte(&own, 1, 9);
            drain(&own);
            CHECK(own.memory[100] == 9);
            CHECK(!ibv_open_xrcd(own.pd->context, &named) && errno == ENOENT);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        drain(&pair);
        CHECK(pair.memory[100] == i);
    }
    pid_t child = fork();
    if (!child) {
        execlp("true", "true", NULL);
        _exit(1);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void *wait_for_completion(void *argument) {
    struct pair *pair = argument;
    struct ibv_cq *cq;
    void *owner;
    ibv_get_cq_event(pair->channel, &cq, &owner);
    return NULL;
}

static void *wait_for_cm(void *argument) {
    struct rdma_cm_event *event;
    rdma_get_cm_event(argument, &event);
    return NULL;
}

static void *wait_for_async(void *argument) {
    struct ibv_async_event event;
    ibv_get_async_event(argument, &event);
    return NULL;
}

static void cancel(void *(*wait)(void *), void *argument) {
    pthread_t thread;
    void *result;
    CHECK(!pthread_create(&thread, NULL, wait, argument));
    CHECK(!pthread_cancel(thread));
    CHECK(!pthread_join(thread, &result) && result == PTHREAD_CANCELED);
}

/* Threads that wait for events are cancelled, and hold nothing then. */
static void test_cancel(void) {
    struct ibv_context *context = open_first();
    struct pair pair = make_pair(context);
    struct rdma_event_channel *channel = rdma_create_event_channel();
    CHECK(channel);
    for (int i = 0; i < 20; i++) {
        cancel(wait_for_completion, &pair);
        cancel(wait_for_cm, channel);
        cancel(wait_for_async, context);
        CHECK(!ibv_req_notify_cq(pair.cq, 0));
        write_byte(&pair, 0, (uint8_t)i);
        wait_for_completion(&pair);
        ibv_ack_cq_events(pair.cq, 1);
        drain(&pair);
    }
    struct rdma_cm_id *id;
    CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) && !rdma_destroy_id(id));
    rdma_destroy_event_channel(channel);
    CHECK(!ibv_destroy_qp(pair.qps[0]) && !ibv_destroy_qp(pair.qps[1]) && !ibv_destroy_cq(pair.cq));
    CHECK(!ibv_destroy_comp_channel(pair.channel));
}

/* A program that watches memory, and calls nothing, sees what its peer writes. */
static void test_watch(void) {
    struct pair pair = make_pair(open_first());
    volatile uint8_t *seen = pair.memory + 100;
    for (int i = 1; i < 100; i++) {
        write_byte(&pair, i & 1, (uint8_t)i);
        while (*seen != i) {
        }
        drain(&pair);
    }
}

/* A library that was loaded for itself, by the names and versions that UCX and NCCL ask for. */
static void test_load(void) {
    void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library);
    CHECK(dlvsym(library, "ibv_get_device_list", "IBVERBS_1.1"));
    CHECK(dlvsym(library, "ibv_reg_mr_iova2", "IBVERBS_1.8"));
    CHECK(dlvsym(dlopen("librdmacm.so.1", RTLD_NOW), "rdma_create_id", "RDMACM_1.0"));
}

/* Descriptors are those of poll(2) and epoll(7), blocking or not: readable means that there is an event. */
static void test_poll(void) {
    struct pair pair = make_pair(open_first());
    struct ibv_cq *cq;
    void *owner;
    int poller = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN | EPOLLET};
    CHECK(!epoll_ctl(poller, EPOLL_CTL_ADD, pair.channel->fd, &event));
    CHECK(!fcntl(pair.channel->fd, F_SETFL, fcntl(pair.channel->fd, F_GETFL) | O_NONBLOCK));
    CHECK(ibv_get_cq_event(pair.channel, &cq, &owner) && errno == EAGAIN);
    for (int i = 0; i < 20; i++) {
        CHECK(!ibv_req_notify_cq(pair.cq, 0));
        CHECK(!epoll_wait(poller, &event, 1, 0));
        write_byte(&pair, 0, (uint8_t)i);
        CHECK(epoll_wait(poller, &event, 1, 10000) == 1);
        CHECK(!ibv_get_cq_event(pair.channel, &cq, &owner) && cq == pair.cq);
        ibv_ack_cq_events(cq, 1);
        drain(&pair);
    }
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } tests[] = {{"fork", test_fork}, {"cancel", test_cancel}, {"watch", test_watch}, {"load", test_load}, {"poll", test_poll}};
    for (size_t i = 0; argc > 1 && i < sizeof tests / sizeof *tests; i++)
        if (!strcmp(argv[1], tests[i].name)) {
            tests[i].run();
            puts("done");
            return 0;
        }
    return 2;
}
