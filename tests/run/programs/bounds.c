/* The sizes of what can be created, of the device: bounds WORK_REQUESTS ELEMENTS INLINE COMPLETIONS READS PAIRS. */
#include "pair.h"

#include <stdbool.h>

static struct ibv_pd *pd;
static struct ibv_cq *cq;

/* Whether a queue pair of these sizes is created, or refused with EINVAL. */
static bool has_queue_pair(struct ibv_qp_cap cap) {
    struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = cap};
    struct ibv_qp *qp = ibv_create_qp(pd, &attr);
    CHECK(qp || errno == EINVAL);
    if (qp)
        CHECK(!ibv_destroy_qp(qp));
    return qp;
}

static bool has_shared_queue(uint32_t wr, uint32_t sge) {
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = wr, .max_sge = sge}};
    struct ibv_srq *srq = ibv_create_srq(pd, &attr);
    CHECK(srq || errno == EINVAL);
    if (srq)
        CHECK(!ibv_destroy_srq(srq));
    return srq;
}

/* Whether a queue pair takes so many READs and atomics. */
static bool has_reads(struct ibv_context *context, uint8_t count) {
    struct pair pair = create_pair(context);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    CHECK(!ibv_modify_qp(pair.qps[0], &attr, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS));
    attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .max_dest_rd_atomic = count,
                                .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = pair.gid}}};
    int code = ibv_modify_qp(pair.qps[0], &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                                     IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    CHECK(!code || code == EINVAL);
    return !code;
}

int main(int count, char **arguments) {
    CHECK(count == 7);
    uint32_t values[6];
    for (int i = 0; i < 6; i++)
        values[i] = (uint32_t)strtoul(arguments[i + 1], NULL, 10);
    struct ibv_context *context = open_first();
    struct ibv_device_attr attr;
    CHECK(!ibv_query_device(context, &attr));
    CHECK((uint32_t)attr.max_qp_wr == values[0] && (uint32_t)attr.max_srq_wr == values[0]);
    CHECK((uint32_t)attr.max_sge == values[1] && (uint32_t)attr.max_srq_sge == values[1]);
    CHECK((uint32_t)attr.max_cqe == values[3]);
    CHECK((uint32_t)attr.max_qp_rd_atom == values[4] && (uint32_t)attr.max_qp_init_rd_atom == values[4]);
    CHECK((uint32_t)attr.max_qp == values[5]);
    CHECK(pd = ibv_alloc_pd(context));
    CHECK(cq = ibv_create_cq(context, 1, NULL, NULL, 0));
    for (uint32_t over = 0; over < 2; over++) {
        bool is_refused = over;
        CHECK(has_queue_pair((struct ibv_qp_cap){values[0] + over, 1, 1, 1, 0}) != is_refused);
        CHECK(has_queue_pair((struct ibv_qp_cap){1, values[0] + over, 1, 1, 0}) != is_refused);
        CHECK(has_queue_pair((struct ibv_qp_cap){1, 1, values[1] + over, 1, 0}) != is_refused);
        CHECK(has_queue_pair((struct ibv_qp_cap){1, 1, 1, values[1] + over, 0}) != is_refused);
        CHECK(has_queue_pair((struct ibv_qp_cap){1, 1, 1, 1, values[2] + over}) != is_refused);
        CHECK(has_shared_queue(values[0] + over, 1) != is_refused);
        CHECK(has_shared_queue(1, values[1] + over) != is_refused);
        CHECK(has_reads(context, (uint8_t)(values[4] + over)) != is_refused);
        struct ibv_cq *made = ibv_create_cq(context, (int)(values[3] + over), NULL, NULL, 0);
        CHECK(!made == is_refused && (made || errno == EINVAL));
    }
    CHECK(!ibv_create_cq(context, 1, NULL, NULL, context->num_comp_vectors) && errno == EINVAL);
    puts("done");
    return 0;
}
