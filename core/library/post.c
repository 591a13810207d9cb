/* Work requests. */
#include "objects.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* -- what is kept of a request ----------------------------------------------------------------------------------------- */

void pin_free(struct pin *pin) {
    if (pin->ah && !__atomic_sub_fetch(&pin->ah->uses, 1, __ATOMIC_ACQ_REL))
        free(pin->ah);
    free(pin);
}

/* A pin with room for elements, and for bytes that are copied. */
static struct pin *make_pin(uint64_t wr_id, size_t elements, size_t bytes) {
    struct pin *pin = malloc(sizeof *pin + elements * sizeof *pin->elements + bytes);
    if (pin) {
        pin->wr_id = wr_id;
        pin->ah = NULL;
    }
    return pin;
}

/* The memory of elements. One that names no memory of the protection domain makes the request fail in its turn. */
static struct rdmacm_memory find_memory(struct pin *pin, const struct pd *pd, const struct ibv_sge *list, size_t count,
                                        uint32_t access) {
    struct rdmacm_memory memory = {.elements = pin->elements};
    for (size_t i = 0; i < count; i++) {
        if (!list[i].length)
            continue;
        uint8_t *data = rdmacm_regions_find(&process_regions, pd->number, list[i].lkey, list[i].addr, list[i].length,
                                            access, NULL);
        if (!data)
            return (struct rdmacm_memory){.is_inaccessible = true};
        pin->elements[memory.count++] = (struct rdmacm_element){data, list[i].length, list[i].lkey};
        memory.length += list[i].length;
    }
    return memory;
}

/* The same of elements whose bytes are copied. */
static struct rdmacm_memory copy_inline(struct pin *pin, const struct ibv_sge *list, size_t count) {
    uint8_t *bytes = (uint8_t *)&pin->elements[1];
    struct rdmacm_memory memory = {.elements = pin->elements};
    for (size_t i = 0; i < count; i++) {
        memcpy(bytes + memory.length, (const void *)(uintptr_t)list[i].addr, list[i].length);
        memory.length += list[i].length;
    }
    memory.count = memory.length ? 1 : 0;
    pin->elements[0] = (struct rdmacm_element){bytes, (uint32_t)memory.length, 0};
    return memory;
}

static uint64_t total_of(const struct ibv_sge *list, int count) {
    uint64_t total = 0;
    for (int i = 0; i < count; i++)
        total += list[i].length;
    return total;
}

/* -- sends ------------------------------------------------------------------------------------------------------------- */

/* Take over what only some requests have. */
static void take_fields(const struct qp *qp, const struct ibv_send_wr *wr, struct rdmacm_send *send, struct pin *pin) {
    const struct rdmacm_request_type *type = &rdmacm_request_types[send->opcode];
    if (type->word_kind == RDMACM_IMMEDIATE)
        send->word = ntohl(wr->imm_data);
    else if (type->word_kind == RDMACM_INVALIDATED)
        send->word = wr->invalidate_rkey;
    if (qp->ibv.qp_type == IBV_QPT_XRC_SEND)
        send->remote_srqn = wr->qp_type.xrc.remote_srqn;
    if (type->flags & RDMACM_IS_ATOMIC) {
        send->remote_addr = wr->wr.atomic.remote_addr;
        send->rkey = wr->wr.atomic.rkey;
        send->compare_add = wr->wr.atomic.compare_add;
        send->swap = wr->wr.atomic.swap;
    } else if (type->flags & RDMACM_IS_FLUSH) { /* of wr_flush() */
        send->remote_addr = wr->wr.atomic.remote_addr;
        send->rkey = wr->wr.atomic.rkey;
        send->length = (uint32_t)wr->wr.atomic.compare_add;
        send->placement = wr->wr.atomic.swap & 0xFF;
        send->level = wr->wr.atomic.swap >> 8 & 0xFF;
    } else if (type->flags & (RDMACM_IS_WRITE | RDMACM_IS_READ | RDMACM_IS_ATOMIC_WRITE)) {
        send->remote_addr = wr->wr.rdma.remote_addr;
        send->rkey = wr->wr.rdma.rkey;
    }
    if (send->opcode == RDMACM_WR_BIND_MW) {
        struct mw *mw = (struct mw *)wr->bind_mw.mw;
        const struct mr *mr = (const struct mr *)wr->bind_mw.bind_info.mr;
        static uint64_t binds;
        pin->bind = (struct rdmacm_bind){
            .window = &mw->window,
            .key = wr->bind_mw.rkey,
            .region_key = mr ? mr->ibv.lkey : 0,
            .owner = (uintptr_t)mr,
            .address = wr->bind_mw.bind_info.addr,
            .length = wr->bind_mw.bind_info.length,
            .access = wr->bind_mw.bind_info.mw_access_flags,
            .number = ++binds,
        };
        send->bind = &pin->bind;
    }
}

static int take_address(struct qp *qp, const struct ibv_send_wr *wr, struct rdmacm_send *send, struct pin *pin) {
    struct ah *ah = (struct ah *)wr->wr.ud.ah;
    if (!ah || qp->end.fds[ah->route.is_ipv6] < 0)
        return EINVAL;
    send->route = &ah->route;
    send->flow = ah->flow;
    send->dest_qpn = wr->wr.ud.remote_qpn & RDMACM_QPN_MASK;
    uint32_t qkey = wr->wr.ud.remote_qkey;
    send->qkey = qkey & RDMACM_OWN_QKEY ? qp->ud.qkey : qkey;
    pin->ah = ah;
    __atomic_add_fetch(&ah->uses, 1, __ATOMIC_RELAXED);
    return 0;
}

bool qp_has_opcode(const struct qp *qp, enum ibv_wr_opcode opcode) {
    return qp->conn->rc ? rdmacm_rc_has(&qp->rc, (uint64_t)opcode) : rdmacm_ud_has((uint64_t)opcode);
}

/* Queue one request; 0 or an errno. With the mutex. */
static int post_one(struct qp *qp, const struct ibv_send_wr *wr) {
    bool is_inline = wr->send_flags & IBV_SEND_INLINE;
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->cap.max_send_sge || !qp_has_opcode(qp, wr->opcode))
        return EINVAL;
    if (qp->conn->sends_change >= (int64_t)qp->cap.max_send_wr)
        return ENOMEM;
    uint64_t total = is_inline ? total_of(wr->sg_list, wr->num_sge) : 0;
    if (total > qp->cap.max_inline_data)
        return EINVAL;
    struct pin *pin = make_pin(wr->wr_id, is_inline ? 1 : (size_t)wr->num_sge, total);
    if (!pin)
        return ENOMEM;
    struct rdmacm_send send = {.pin = pin, .opcode = (uint8_t)wr->opcode};
    const struct rdmacm_request_type *type = &rdmacm_request_types[send.opcode];
    uint32_t access = type->flags & (RDMACM_IS_READ | RDMACM_IS_ATOMIC) ? RDMACM_ACCESS_LOCAL_WRITE : 0;
    send.memory = is_inline ? copy_inline(pin, wr->sg_list, (size_t)wr->num_sge)
                            : find_memory(pin, qp->pd, wr->sg_list, (size_t)wr->num_sge, access);
    send.length = (uint32_t)send.memory.length;
    send.solicited = wr->send_flags & IBV_SEND_SOLICITED;
    send.fence = wr->send_flags & IBV_SEND_FENCE;
    send.unsignaled = !qp->signals_all && !(wr->send_flags & IBV_SEND_SIGNALED);
    take_fields(qp, wr, &send, pin);
    int code = qp->conn->rc ? 0 : take_address(qp, wr, &send, pin);
    bool done = !code && (qp->conn->rc ? rdmacm_post_send(qp->conn->queues, &send) : rdmacm_ud_post_send(&qp->ud, &send));
    if (done) {
        qp->conn->sends_change++;
        return 0;
    }
    pin_free(pin);
    return code ? code : send.memory.length > RDMACM_LONGEST_MESSAGE || !qp->conn->rc ? EINVAL : ENOMEM;
}

int verbs_post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    struct qp *qp = qp_of(ibv);
    int code = 0;
    rdmacm_enter();
    bool may_send = ibv->state == IBV_QPS_RTS || ibv->state == IBV_QPS_SQD || ibv->state == IBV_QPS_SQE ||
                    ibv->state == IBV_QPS_ERR;
    if (!may_send)
        code = EINVAL;
    for (; wr && !code; wr = code ? wr : wr->next)
        code = post_one(qp, wr);
    if (may_send && qp->conn->wire) {
        rdmacm_wire_posted(qp->conn, rdmacm_now());
        process_settle(qp->conn->wire);
    }
    rdmacm_leave();
    if (code)
        *bad = wr;
    return code;
}

/* -- receives ---------------------------------------------------------------------------------------------------------- */

static int make_recv(const struct pd *pd, const struct ibv_recv_wr *wr, size_t most, struct rdmacm_recv *recv) {
    if (wr->num_sge < 0 || (size_t)wr->num_sge > most)
        return EINVAL;
    struct pin *pin = make_pin(wr->wr_id, (size_t)wr->num_sge, 0);
    if (!pin)
        return ENOMEM;
    recv->pin = pin;
    recv->memory = find_memory(pin, pd, wr->sg_list, (size_t)wr->num_sge, RDMACM_ACCESS_LOCAL_WRITE);
    return 0;
}

int verbs_post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct qp *qp = qp_of(ibv);
    int code = 0;
    rdmacm_enter();
    if (ibv->state == IBV_QPS_RESET || qp->srq || ibv->qp_type == IBV_QPT_XRC_SEND || ibv->qp_type == IBV_QPT_XRC_RECV)
        code = EINVAL;
    for (; wr && !code; wr = code ? wr : wr->next) {
        struct rdmacm_recv recv;
        code = qp->conn->recvs_change >= (int64_t)qp->cap.max_recv_wr ? ENOMEM
                                                                     : make_recv(qp->pd, wr, qp->cap.max_recv_sge, &recv);
        if (code)
            break;
        if (rdmacm_post_recv(qp->conn->queues, &recv)) {
            qp->conn->recvs_change++;
        } else {
            pin_free(recv.pin);
            code = ENOMEM;
        }
    }
    if (qp->conn->queues->failed && qp->conn->wire) { /* they are flushed */
        rdmacm_wire_see_engine(qp->conn);
        process_settle(qp->conn->wire);
    }
    rdmacm_leave();
    if (code)
        *bad = wr;
    return code;
}

int verbs_post_srq_recv(struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
    struct srq *srq = srq_of(ibv);
    int code = 0;
    rdmacm_enter();
    for (; wr; wr = wr->next) {
        struct rdmacm_recv recv;
        code = make_recv(srq->pd, wr, srq->max_sge, &recv);
        if (!code && !rdmacm_srq_post(&srq->core, &recv)) {
            pin_free(recv.pin);
            code = ENOMEM;
        }
        if (code)
            break;
    }
    rdmacm_leave();
    if (code)
        *bad = wr;
    return code;
}
