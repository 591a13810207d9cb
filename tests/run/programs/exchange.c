/* Threads with a pair of queue pairs each, whose ends exchange messages of every kind: exchange THREADS ROUNDS
 * [lossy]. */
#include <infiniband/verbs.h>

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 9000, DEPTH = 16 };

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s fails, errno %d\n", __FILE__, __LINE__, #condition, errno);                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static struct ibv_context *context;
static union ibv_gid gid;
static int rounds;
static bool is_lossy;

struct end {
    struct ibv_pd *pd;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint8_t memory[2 * SIZE];
};

static void create(struct end *end) {
    CHECK(end->pd = ibv_alloc_pd(context));
    CHECK(end->channel = ibv_create_comp_channel(context));
    CHECK(end->cq = ibv_create_cq(context, 2 * DEPTH, end, end->channel, 0));
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    CHECK(end->mr = ibv_reg_mr(end->pd, end->memory, sizeof end->memory, access));
    struct ibv_qp_init_attr attr = {.send_cq = end->cq, .recv_cq = end->cq, .qp_type = IBV_QPT_RC,
                                    .cap = {DEPTH, DEPTH, 4, 4, 64}};
    CHECK(end->qp = ibv_create_qp(end->pd, &attr));
}

static void connect_to(struct end *end, const struct end *peer) {
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = 0xF};
    CHECK(!ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp->qp_num,
                                .rq_psn = 0xFFFFF0, .max_dest_rd_atomic = 4, .min_rnr_timer = 1,
                                .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid}}};
    CHECK(!ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = 0xFFFFF0, .timeout = 16, .retry_cnt = 7,
                                .rnr_retry = 7, .max_rd_atomic = 4};
    CHECK(!ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
                                             IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void destroy(struct end *end) {
    CHECK(!ibv_destroy_qp(end->qp));
    CHECK(!ibv_destroy_cq(end->cq));
    CHECK(!ibv_destroy_comp_channel(end->channel));
    CHECK(!ibv_dereg_mr(end->mr));
    CHECK(!ibv_dealloc_pd(end->pd));
}

/* The next completion: polled, or waited for. */
static struct ibv_wc next(struct end *end, int sleeps) {
    struct ibv_wc wc;
    int found;
    while (!(found = ibv_poll_cq(end->cq, 1, &wc))) {
        if (!sleeps)
            continue;
        CHECK(!ibv_req_notify_cq(end->cq, 0));
        if ((found = ibv_poll_cq(end->cq, 1, &wc)))
            break;
        struct ibv_cq *cq;
        void *owner;
        CHECK(!ibv_get_cq_event(end->channel, &cq, &owner));
        CHECK(cq == end->cq && owner == end);
        ibv_ack_cq_events(cq, 1);
    }
    CHECK(found == 1);
    return wc;
}

static void receive(struct end *end, uint64_t number) {
    struct ibv_sge parts[] = {{(uintptr_t)end->memory + SIZE, 100, end->mr->lkey},
                              {(uintptr_t)end->memory + SIZE + 100, SIZE - 100, end->mr->lkey}};
    struct ibv_recv_wr wr = {.wr_id = number, .sg_list = parts, .num_sge = 2}, *bad;
    CHECK(!ibv_post_recv(end->qp, &wr, &bad));
}

static void send(struct end *end, const struct end *peer, enum ibv_wr_opcode opcode, uint32_t length, int flags) {
    struct ibv_sge parts[] = {{(uintptr_t)end->memory, length / 2, end->mr->lkey},
                              {(uintptr_t)end->memory + length / 2, length - length / 2, end->mr->lkey}};
    struct ibv_send_wr wr = {.wr_id = opcode, .sg_list = parts, .num_sge = 2, .opcode = opcode,
                             .send_flags = IBV_SEND_SIGNALED | flags, .imm_data = htobe32(length)}, *bad;
    if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        parts[0] = (struct ibv_sge){(uintptr_t)end->memory, 8, end->mr->lkey};
        wr.num_sge = 1;
        wr.wr.atomic.remote_addr = (uintptr_t)peer->memory + SIZE;
        wr.wr.atomic.compare_add = 5;
        wr.wr.atomic.rkey = peer->mr->rkey;
    } else {
        wr.wr.rdma.remote_addr = (uintptr_t)peer->memory + SIZE;
        wr.wr.rdma.rkey = peer->mr->rkey;
    }
    CHECK(!ibv_post_send(end->qp, &wr, &bad));
}

static void fill(uint8_t *bytes, uint32_t length, unsigned seed) {
    for (uint32_t i = 0; i < length; i++)
        bytes[i] = (uint8_t)(seed + i * 7);
}

static void expect(struct ibv_wc wc, enum ibv_wc_opcode opcode, uint32_t length) {
    CHECK(wc.status == IBV_WC_SUCCESS);
    CHECK(wc.opcode == opcode);
    if (length)
        CHECK(wc.byte_len == length);
}

/* One message of each kind from `end` to `peer`. */
static void exchange(struct end *end, struct end *peer, unsigned seed) {
    uint32_t length = 1 + seed * 131 % (SIZE - 1), is_short = length <= 64;
    int sleeps = seed & 1;
    fill(end->memory, length, seed);
    receive(peer, seed);
    send(end, peer, seed & 2 ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, length, is_short ? IBV_SEND_INLINE : 0);
    struct ibv_wc wc = next(peer, sleeps);
    expect(wc, IBV_WC_RECV, length);
    CHECK(wc.wr_id == seed && (!(seed & 2) || (wc.wc_flags & IBV_WC_WITH_IMM && be32toh(wc.imm_data) == length)));
    CHECK(!memcmp(peer->memory + SIZE, end->memory, length));
    expect(next(end, sleeps), IBV_WC_SEND, 0);
    fill(end->memory, length, seed + 1);
    send(end, peer, IBV_WR_RDMA_WRITE, length, 0);
    expect(next(end, sleeps), IBV_WC_RDMA_WRITE, 0);
    CHECK(!memcmp(peer->memory + SIZE, end->memory, length));
    memset(end->memory, 0, length);
    send(end, peer, IBV_WR_RDMA_READ, length, 0);
    expect(next(end, sleeps), IBV_WC_RDMA_READ, 0);
    CHECK(!memcmp(peer->memory + SIZE, end->memory, length));
    uint64_t before, after;
    memcpy(&before, peer->memory + SIZE, sizeof before);
    send(end, peer, IBV_WR_ATOMIC_FETCH_AND_ADD, 8, 0);
    expect(next(end, sleeps), IBV_WC_FETCH_ADD, 0);
    memcpy(&after, peer->memory + SIZE, sizeof after);
    CHECK(after == before + 5 && !memcmp(end->memory, &before, sizeof before));
}

/* A key that is wrong ends both queue pairs, and everything that is posted completes. */
static void break_down(struct end *end, struct end *peer) {
    receive(peer, 1);
    receive(end, 2);
    struct ibv_sge part = {(uintptr_t)end->memory, 8, end->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = 3, .sg_list = &part, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
                             .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.wr.rdma.remote_addr = (uintptr_t)peer->memory;
    wr.wr.rdma.rkey = peer->mr->rkey ^ 0x5A5A5A5A;
    CHECK(!ibv_post_send(end->qp, &wr, &bad));
    struct ibv_wc wc = next(end, 0);
    /* Where packets are lost, the NAK may be, and a queue pair that has failed answers nothing. */
    CHECK(wc.wr_id == 3 && (wc.status == IBV_WC_REM_ACCESS_ERR || (is_lossy && wc.status == IBV_WC_RETRY_EXC_ERR)));
    wc = next(end, 0);
    CHECK(wc.wr_id == 2 && wc.status == IBV_WC_WR_FLUSH_ERR);
    wc = next(peer, 0);
    CHECK(wc.wr_id == 1 && wc.status == IBV_WC_WR_FLUSH_ERR);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    CHECK(!ibv_query_qp(peer->qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR);
}

static void *work(void *number) {
    struct end *ends = calloc(2, sizeof *ends);
    CHECK(ends);
    create(&ends[0]);
    create(&ends[1]);
    connect_to(&ends[0], &ends[1]);
    connect_to(&ends[1], &ends[0]);
    for (int i = 0; i < rounds; i++)
        exchange(&ends[i & 1], &ends[~i & 1], (unsigned)(i + 1000 * (int)(intptr_t)number));
    break_down(&ends[0], &ends[1]);
    destroy(&ends[0]);
    destroy(&ends[1]);
    free(ends);
    return NULL;
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 2, count;
    rounds = argc > 2 ? atoi(argv[2]) : 20;
    is_lossy = argc > 3 && !strcmp(argv[3], "lossy");
    struct ibv_device **list = ibv_get_device_list(&count);
    CHECK(list && count);
    CHECK(context = ibv_open_device(list[0]));
    ibv_free_device_list(list);
    CHECK(!ibv_query_gid(context, 1, 0, &gid));
    for (int again = 0; again < 2; again++) {
        pthread_t running[64];
        for (int i = 0; i < threads; i++)
            CHECK(!pthread_create(&running[i], NULL, work, (void *)(intptr_t)i));
        for (int i = 0; i < threads; i++)
            pthread_join(running[i], NULL);
    }
    CHECK(!ibv_close_device(context));
    puts("done");
    return 0;
}
