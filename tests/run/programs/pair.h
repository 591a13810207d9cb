/* Two queue pairs of this process, and what checks that calls succeed. */
#ifndef PAIR_H
#define PAIR_H

#include <infiniband/verbs.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

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
    CHECK(context && context->device == list[0]); /* which programs use as long as the context is open */
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
    union ibv_gid gid;
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

/* They are in RESET. */
static struct pair create_pair(struct ibv_context *context) {
    struct pair pair = {.memory = calloc(1, SIZE)};
    CHECK(!ibv_query_gid(context, 1, 0, &pair.gid));
    CHECK(pair.pd = ibv_alloc_pd(context));
    CHECK(pair.channel = ibv_create_comp_channel(context));
    CHECK(pair.cq = ibv_create_cq(context, 16, NULL, pair.channel, 0));
    CHECK(pair.mr = ibv_reg_mr(pair.pd, pair.memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
    struct ibv_qp_init_attr attr = {.send_cq = pair.cq, .recv_cq = pair.cq, .qp_type = IBV_QPT_RC, .cap = {4, 4, 1, 1, 0}};
    for (int i = 0; i < 2; i++)
        CHECK(pair.qps[i] = ibv_create_qp(pair.pd, &attr));
    return pair;
}

static struct pair make_pair(struct ibv_context *context) {
    struct pair pair = create_pair(context);
    for (int i = 0; i < 2; i++)
        connect_one(pair.qps[i], pair.qps[!i]->qp_num, pair.gid);
    return pair;
}

#endif
