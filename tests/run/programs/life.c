/* What programs do besides exchanging messages: life fork|cancel|watch|load|poll. Each prints "done". */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
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

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s fails, errno %d\n", __FILE__, __LINE__, #condition, errno);                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { SIZE = 4096 };

static struct ibv_context *open_first(void) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    CHECK(list && list[0]);
    struct ibv_context *context = ibv_open_device(list[0]);
    CHECK(context);
    ibv_free_device_list(list);
    return context;
}

struct pair {
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qps[2];
    struct ibv_mr *mr;
    uint8_t *memory;
};

static void connect_one(struct ibv_qp *qp, uint32_t peer, union ibv_gid gid) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 0xF};
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer,
                                .max_dest_rd_atomic = 1, .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid}}};
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .timeout = 16, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                        IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
}

static struct pair make_pair(struct ibv_context *context) {
    struct pair pair = {.memory = calloc(1, SIZE)};
    union ibv_gid gid;
    CHECK(!ibv_query_gid(context, 1, 0, &gid));
    CHECK(pair.pd = ibv_alloc_pd(context));
    CHECK(pair.channel = ibv_create_comp_channel(context));
    CHECK(pair.cq = ibv_create_cq(context, 16, NULL, pair.channel, 0));
    CHECK(pair.mr = ibv_reg_mr(pair.pd, pair.memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
    struct ibv_qp_init_attr attr = {.send_cq = pair.cq, .recv_cq = pair.cq, .qp_type = IBV_QPT_RC, .cap = {4, 4, 1, 1, 0}};
    for (int i = 0; i < 2; i++)
        CHECK(pair.qps[i] = ibv_create_qp(pair.pd, &attr));
    for (int i = 0; i < 2; i++)
        connect_one(pair.qps[i], pair.qps[!i]->qp_num, gid);
    return pair;
}

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
    for (int i = 0; i < 3; i++) {
        write_byte(&pair, 0, (uint8_t)i);
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            struct pair own = make_pair(open_first());
            write_byte(&own, 1, 9);
            drain(&own);
            CHECK(own.memory[100] == 9);
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
