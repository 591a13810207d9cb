/* What docs/run.md lists as not there fails, with EOPNOTSUPP. */
#include "pair.h"

#define IS_MISSING(call)                                                                                               \
    do {                                                                                                               \
        errno = 0;                                                                                                     \
        CHECK((call) && errno == EOPNOTSUPP);                                                                          \
    } while (0)

int main(void) {
    struct ibv_context *context = open_first();
    struct pair pair = create_pair(context);

    struct ibv_qp_init_attr raw = {.send_cq = pair.cq, .recv_cq = pair.cq, .qp_type = IBV_QPT_RAW_PACKET};
    IS_MISSING(!ibv_create_qp(pair.pd, &raw));
    struct ibv_flow_attr flow = {.port = 1};
    IS_MISSING(!ibv_create_flow(pair.qps[0], &flow));
    struct ibv_alloc_dm_attr memory = {.length = 64};
    IS_MISSING(!ibv_alloc_dm(context, &memory));
    IS_MISSING(!ibv_reg_dmabuf_mr(pair.pd, 0, SIZE, 0, -1, IBV_ACCESS_LOCAL_WRITE));
    IS_MISSING(!ibv_reg_mr(pair.pd, pair.memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_ON_DEMAND));
    struct ibv_wq_init_attr queue = {.wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 1, .pd = pair.pd, .cq = pair.cq};
    IS_MISSING(!ibv_create_wq(context, &queue));

    IS_MISSING(!ibv_import_device(0));
    IS_MISSING(!ibv_import_pd(context, 0));
    struct ibv_qp_open_attr other = {.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_TYPE, .qp_type = IBV_QPT_XRC_RECV};
    IS_MISSING(!ibv_open_qp(context, &other));

    struct ibv_cq_init_attr_ex times = {.cqe = 1, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP};
    IS_MISSING(!ibv_create_cq_ex(context, &times));

    struct ibv_qp_attr alternate = {.qp_state = IBV_QPS_RTS, .path_mig_state = IBV_MIG_REARM};
    int code = ibv_modify_qp(pair.qps[0], &alternate, IBV_QP_ALT_PATH);
    CHECK(code == EOPNOTSUPP);
    puts("done");
    return 0;
}
