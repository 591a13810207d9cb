/* Shared receive queues. */
#include "rdmacm_core.h"

#include <stdlib.h>

void rdmacm_srq_init(struct rdmacm_srq *srq, size_t max_recvs) { *srq = (struct rdmacm_srq){.max_recvs = max_recvs}; }

void rdmacm_srq_free(struct rdmacm_srq *srq) {
    free(srq->recvs);
    rdmacm_srq_init(srq, 0);
}

bool rdmacm_srq_post(struct rdmacm_srq *srq, const struct rdmacm_recv *recv) {
    if (srq->recvs_count >= srq->max_recvs || !RDMACM_RING_RESERVE(srq, recvs))
        return false;
    *RDMACM_RING_AT(srq, recvs, srq->recvs_count++) = *recv;
    return true;
}

bool rdmacm_srq_take(struct rdmacm_srq *srq, struct rdmacm_recv *recv) {
    bool has_any = srq->recvs_count;
    if (has_any) {
        *recv = *RDMACM_RING_AT(srq, recvs, 0);
        RDMACM_RING_DROP(srq, recvs);
    }
    if (srq->recvs_count < srq->limit) {
        srq->limit = 0;
        srq->is_limit_reached = true;
    }
    return has_any;
}

void rdmacm_recv_look_up(struct rdmacm_recv *recv, const struct rdmacm_regions *regions, uint64_t pd, uint32_t lkey) {
    rdmacm_memory_look_up(&recv->memory, regions, pd, lkey, RDMACM_ACCESS_LOCAL_WRITE);
}

void rdmacm_srq_look_up(struct rdmacm_srq *srq, const struct rdmacm_regions *regions, uint64_t pd, uint32_t lkey) {
    for (size_t i = 0; i < srq->recvs_count; i++)
        rdmacm_recv_look_up(RDMACM_RING_AT(srq, recvs, i), regions, pd, lkey);
}
