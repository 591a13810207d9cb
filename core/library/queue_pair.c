/* Queue pairs: their life, states and attributes. */
#include "objects.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WR = 1 << 16, MOST_INLINE = 4096, INLINE_GRANTED = 256, MOST_CAUGHT_UP = 64 };

static uint8_t transport_of(enum ibv_qp_type type) {
    return type == IBV_QPT_RC ? RDMACM_RC : type == IBV_QPT_UC ? RDMACM_UC : type == IBV_QPT_UD ? RDMACM_UD : RDMACM_XRC;
}

/* -- the engine -------------------------------------------------------------------------------------------------------- */

/* Begin anew, in RESET. */
static void start_engine(struct qp *qp) {
    struct rdmacm_queues *queues;
    if (qp->ibv.qp_type == IBV_QPT_UD) {
        rdmacm_ud_init(&qp->ud, qp->ibv.qp_num);
        qp->ud.max_payload = RDMACM_UD_MOST_PAYLOAD;
        queues = &qp->ud.queues;
    } else {
        rdmacm_rc_init(&qp->rc, transport_of(qp->ibv.qp_type), qp->ibv.qp_num,
                       qp->ibv.qp_type == IBV_QPT_XRC_RECV ? &qp->xrcd->queues : NULL);
        qp->rc.qp = (uintptr_t)qp;
        queues = &qp->rc.queues;
    }
    queues->regions = &process_regions;
    queues->pd = qp->pd ? qp->pd->number : 0;
    queues->srq = qp->srq && qp->ibv.qp_type != IBV_QPT_XRC_RECV ? &qp->srq->core : NULL;
    qp->conn->queues = queues;
}

/* Drop everything that is posted, without completions. */
static void stop_engine(struct qp *qp) {
    struct rdmacm_queues *queues = qp->conn->queues;
    for (size_t i = 0; i < queues->sends_count; i++)
        pin_free(RDMACM_RING_AT(queues, sends, i)->pin);
    for (size_t i = 0; i < queues->recvs_count; i++)
        pin_free(RDMACM_RING_AT(queues, recvs, i)->pin);
    for (size_t i = 0; i < queues->completions.count; i++)
        pin_free(queues->completions.items[i].pin);
    if (queues->current_recv.pin)
        pin_free(queues->current_recv.pin);
    if (qp->conn->rc) {
        rdmacm_windows_free(&process_regions, qp->rc.qp);
        rdmacm_rc_free(&qp->rc);
    } else {
        rdmacm_queues_free(queues);
    }
    qp->conn->sends_change = qp->conn->recvs_change = 0;
}

/* Join the wire; packets are accepted from RTR on. */
static bool join(struct qp *qp, struct rdmacm_wire *wire) {
    struct rdmacm_conn *conn = qp->ibv.qp_type == IBV_QPT_UD ? &qp->end.conn : &qp->connection;
    qp->conn = conn;
    conn->owner = qp;
    conn->qp_num = qp->ibv.qp_num;
    conn->has_timer = true; /* the wire's list of deadlines is enough */
    conn->send_cq = qp->ibv.send_cq ? &cq_of(qp->ibv.send_cq)->core : NULL;
    conn->recv_cq = qp->ibv.recv_cq ? &cq_of(qp->ibv.recv_cq)->core : NULL;
    if (qp->ibv.qp_type == IBV_QPT_UD) {
        conn->ud = &qp->end;
        qp->end.ud = &qp->ud;
        memcpy(qp->end.fds, qp->slot->fds, sizeof qp->end.fds);
        qp->end.addresses = &context_of(qp->ibv.context)->addresses;
    } else {
        conn->rc = &qp->rc;
    }
    start_engine(qp);
    if (!rdmacm_wire_attach(wire, conn))
        return false;
    conn->known->accepts = RDMACM_ACCEPTS_NONE;
    qp->counters = counters_of(context_of(qp->ibv.context)->device->info.index);
    conn->known->refused_at = qp->counters ? qp->counters->refused : NULL;
    return true;
}

/* -- creating ---------------------------------------------------------------------------------------------------------- */

static int check_caps(const struct ibv_qp_init_attr_ex *attr) {
    const struct ibv_qp_cap *cap = &attr->cap;
    if (cap->max_send_wr > MOST_WR || cap->max_recv_wr > MOST_WR || cap->max_send_sge > RDMACM_MOST_ELEMENTS ||
        cap->max_recv_sge > RDMACM_MOST_ELEMENTS || cap->max_inline_data > MOST_INLINE)
        return EINVAL;
    bool is_target = attr->qp_type == IBV_QPT_XRC_RECV, is_initiator = attr->qp_type == IBV_QPT_XRC_SEND;
    if (attr->qp_type == IBV_QPT_RAW_PACKET || attr->qp_type == IBV_QPT_DRIVER)
        return EOPNOTSUPP;
    if (!is_target && !is_initiator && attr->qp_type != IBV_QPT_RC && attr->qp_type != IBV_QPT_UC &&
        attr->qp_type != IBV_QPT_UD)
        return EINVAL;
    if (is_target)
        return attr->comp_mask & IBV_QP_INIT_ATTR_XRCD && attr->xrcd ? 0 : EINVAL;
    if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || !attr->pd || !attr->send_cq)
        return EINVAL;
    return is_initiator || attr->recv_cq ? 0 : EINVAL;
}

/* What belongs to it may not go away before it. With the mutex. */
static void use(struct qp *qp, unsigned change) {
    if (qp->pd)
        qp->pd->uses += change;
    if (qp->ibv.send_cq)
        cq_of(qp->ibv.send_cq)->uses += change;
    if (qp->ibv.recv_cq)
        cq_of(qp->ibv.recv_cq)->uses += change;
    if (qp->srq)
        qp->srq->uses += change;
    if (qp->xrcd)
        qp->xrcd->uses += change;
}

static void set_parts(struct qp *qp, const struct ibv_qp_init_attr_ex *attr) {
    bool is_target = attr->qp_type == IBV_QPT_XRC_RECV, is_initiator = attr->qp_type == IBV_QPT_XRC_SEND;
    qp->pd = is_target ? NULL : pd_of(attr->pd);
    qp->srq = attr->srq && !is_target && !is_initiator ? srq_of(attr->srq) : NULL;
    qp->xrcd = is_target ? (struct xrcd *)attr->xrcd : NULL;
    qp->cap = attr->cap;
    qp->cap.max_inline_data = attr->cap.max_inline_data < INLINE_GRANTED ? INLINE_GRANTED : attr->cap.max_inline_data;
    if (qp->srq)
        qp->cap.max_recv_wr = qp->cap.max_recv_sge = 0;
    qp->signals_all = attr->sq_sig_all;
    qp->ibv.qp_context = attr->qp_context;
    qp->ibv.pd = is_target ? NULL : attr->pd;
    qp->ibv.send_cq = is_target ? NULL : attr->send_cq;
    qp->ibv.recv_cq = is_target || is_initiator ? NULL : attr->recv_cq;
    qp->ibv.srq = qp->srq ? &qp->srq->ibv : NULL;
    qp->ibv.qp_type = attr->qp_type;
    qp->ibv.state = IBV_QPS_RESET;
}

struct ibv_qp *verbs_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr) {
    const uint32_t known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_CREATE_FLAGS |
                           IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    int code = check_caps(attr);
    if (!code && (attr->comp_mask & ~known || (attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && attr->create_flags)))
        code = EOPNOTSUPP;
    struct qp *qp = code ? NULL : calloc(1, sizeof *qp);
    if (!qp) {
        errno = code ? code : ENOMEM;
        return NULL;
    }
    qp->ibv.context = context;
    set_parts(qp, attr);
    pthread_mutex_init(&qp->ibv.mutex, NULL);
    pthread_cond_init(&qp->ibv.cond, NULL);
    qp->ibv.qp_num = qp->ibv.handle = process_take_number(&qp->slot);
    struct rdmacm_wire *wire = process_wire();
    if (!qp->ibv.qp_num || !wire) {
        free(qp);
        return NULL;
    }
    rdmacm_enter();
    bool done = join(qp, wire);
    if (done) {
        use(qp, 1);
    } else {
        process_give_number(qp->slot, qp->ibv.qp_num);
    }
    rdmacm_leave();
    if (!done) {
        free(qp);
        errno = ENOMEM;
        return NULL;
    }
    code = attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS ? qp_set_builders(qp, attr->send_ops_flags) : 0;
    if (code) {
        ibv_destroy_qp(&qp->ibv);
        errno = code;
        return NULL;
    }
    attr->cap = qp->cap;
    return &qp->ibv;
}

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
    struct ibv_qp_init_attr_ex extended = {
        .qp_context = attr->qp_context, .send_cq = attr->send_cq, .recv_cq = attr->recv_cq, .srq = attr->srq,
        .cap = attr->cap, .qp_type = attr->qp_type, .sq_sig_all = attr->sq_sig_all,
        .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd,
    };
    struct ibv_qp *qp = verbs_create_qp_ex(pd->context, &extended);
    if (qp)
        attr->cap = extended.cap;
    return qp;
}

struct ibv_qp *verbs_open_qp(struct ibv_context *context, struct ibv_qp_open_attr *attr) {
    (void)context, (void)attr; /* a queue pair of another process */
    errno = EOPNOTSUPP;
    return NULL;
}

EXPORT struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *ibv) {
    struct qp *qp = qp_of(ibv);
    return qp->ex.wr_start ? &qp->ex : NULL;
}

/* -- states ------------------------------------------------------------------------------------------------------------ */

enum {
    ADDRESSED = IBV_QP_PKEY_INDEX | IBV_QP_PORT,
    CONNECTED = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN,
    RELIABLE_IN = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
    RELIABLE_OUT = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
    PATHS = IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE,
    BETWEEN = IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX,
    RUNNING = IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | PATHS,
    IS_RC = 1,
    IS_UC = 2,
    IS_UD = 4,
    IS_INITIATOR = 8,
    IS_TARGET = 16,
    IS_ANY = 31,
    IS_CONNECTED = IS_RC | IS_UC | IS_INITIATOR | IS_TARGET,
    IS_RELIABLE_SENDER = IS_RC | IS_INITIATOR,
    IS_RELIABLE_RECEIVER = IS_RC | IS_TARGET,
};

/* The transitions of ibv_modify_qp(3) but to RESET and ERR, with the attributes that each requires and allows
 * (rdmacm/verbs/qpstate.py). */
static const struct transition {
    uint8_t from, to, types;
    int required, optional;
} transitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IS_CONNECTED, ADDRESSED | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_RESET, IBV_QPS_INIT, IS_UD, ADDRESSED | IBV_QP_QKEY, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, IS_CONNECTED, 0, ADDRESSED | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_INIT, IS_UD, 0, ADDRESSED | IBV_QP_QKEY},
    {IBV_QPS_INIT, IBV_QPS_RTR, IS_RELIABLE_RECEIVER, CONNECTED | RELIABLE_IN, BETWEEN},
    {IBV_QPS_INIT, IBV_QPS_RTR, IS_UC | IS_INITIATOR, CONNECTED, BETWEEN},
    {IBV_QPS_INIT, IBV_QPS_RTR, IS_UD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_RTR, IBV_QPS_RTS, IS_RC, IBV_QP_SQ_PSN | RELIABLE_OUT, RUNNING | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTR, IBV_QPS_RTS, IS_INITIATOR, IBV_QP_SQ_PSN | RELIABLE_OUT, RUNNING},
    {IBV_QPS_RTR, IBV_QPS_RTS, IS_TARGET, IBV_QP_SQ_PSN | IBV_QP_TIMEOUT, RUNNING | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTR, IBV_QPS_RTS, IS_UC, IBV_QP_SQ_PSN, RUNNING},
    {IBV_QPS_RTR, IBV_QPS_RTS, IS_UD, IBV_QP_SQ_PSN, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_RTS, IBV_QPS_RTS, IS_RELIABLE_RECEIVER, 0, RUNNING | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_RTS, IS_UC | IS_INITIATOR, 0, RUNNING},
    {IBV_QPS_RTS, IBV_QPS_RTS, IS_UD, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_RTS, IBV_QPS_SQD, IS_ANY, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_RTS, IS_RELIABLE_RECEIVER, 0, RUNNING | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_SQD, IBV_QPS_RTS, IS_UC | IS_INITIATOR, 0, RUNNING},
    {IBV_QPS_SQD, IBV_QPS_RTS, IS_UD, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_SQD, IBV_QPS_SQD, IS_RC, 0, ADDRESSED | IBV_QP_AV | RELIABLE_OUT | RELIABLE_IN | IBV_QP_ACCESS_FLAGS | PATHS},
    {IBV_QPS_SQD, IBV_QPS_SQD, IS_INITIATOR, 0, ADDRESSED | IBV_QP_AV | RELIABLE_OUT | IBV_QP_ACCESS_FLAGS | PATHS},
    {IBV_QPS_SQD, IBV_QPS_SQD, IS_TARGET, 0,
     ADDRESSED | IBV_QP_AV | IBV_QP_TIMEOUT | RELIABLE_IN | IBV_QP_ACCESS_FLAGS | PATHS},
    {IBV_QPS_SQD, IBV_QPS_SQD, IS_UC, 0, IBV_QP_PKEY_INDEX | IBV_QP_AV | IBV_QP_ACCESS_FLAGS | PATHS},
    {IBV_QPS_SQD, IBV_QPS_SQD, IS_UD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_SQE, IBV_QPS_RTS, IS_UC, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_SQE, IBV_QPS_RTS, IS_UD, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
};

static unsigned kind_of(enum ibv_qp_type type) {
    return type == IBV_QPT_RC ? IS_RC : type == IBV_QPT_UC ? IS_UC : type == IBV_QPT_UD ? IS_UD
         : type == IBV_QPT_XRC_SEND ? IS_INITIATOR : IS_TARGET;
}

/* The ends of an XRC connection take attributes of the other direction, which they do not use: perftest gives both all. */
static bool may_change(const struct qp *qp, enum ibv_qp_state to, int mask) {
    enum ibv_qp_state from = qp->ibv.state;
    if (to == IBV_QPS_RESET || (to == IBV_QPS_ERR && from != IBV_QPS_RESET))
        return !(mask & ~(IBV_QP_STATE | IBV_QP_CUR_STATE));
    for (size_t i = 0; i < sizeof transitions / sizeof *transitions; i++) {
        const struct transition *row = &transitions[i];
        if (row->from != from || row->to != to || !(row->types & kind_of(qp->ibv.qp_type)))
            continue;
        int allowed = row->required | row->optional | IBV_QP_STATE;
        if (kind_of(qp->ibv.qp_type) & (IS_INITIATOR | IS_TARGET))
            allowed |= RELIABLE_IN | RELIABLE_OUT;
        return !(row->required & ~mask) && !(mask & ~allowed);
    }
    return false;
}

static int check_values(const struct ibv_qp_attr *attr, int mask) {
    if (mask & IBV_QP_PORT && attr->port_num != 1)
        return EINVAL;
    if (mask & IBV_QP_PKEY_INDEX && attr->pkey_index)
        return EINVAL;
    if (mask & IBV_QP_PATH_MTU && (attr->path_mtu < IBV_MTU_256 || attr->path_mtu > IBV_MTU_4096))
        return EINVAL;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC && attr->max_dest_rd_atomic > 128)
        return EINVAL;
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC && attr->max_rd_atomic > 128)
        return EINVAL;
    if (mask & (IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE))
        return mask & IBV_QP_ALT_PATH ? EOPNOTSUPP : 0;
    return 0;
}

/* -- attributes -------------------------------------------------------------------------------------------------------- */

/* Take the way to the peer over. */
static void set_route(struct qp *qp, const struct rdmacm_route *route, const uint8_t *local, const uint8_t *remote,
                      size_t length, uint32_t scope) {
    struct rdmacm_conn *conn = &qp->connection;
    memcpy(conn->local, local, length);
    memcpy(conn->remote, remote, length);
    conn->remote_scope = scope;
    conn->remote_port = 0;
    conn->route = *route;
    conn->fd = qp->slot->fds[route->is_ipv6];
    rdmacm_flow_init(&qp->rc.flow_out, local, remote, length, RDMACM_ROCE_PORT, RDMACM_ROCE_PORT);
    rdmacm_flow_init(&qp->rc.flow_in, remote, local, length, RDMACM_ROCE_PORT, RDMACM_ROCE_PORT);
}

static void keep_attributes(struct qp *qp, const struct ibv_qp_attr *attr, int mask) {
#define KEEP(bit, field)                                                                                               \
    if (mask & (bit))                                                                                                  \
    qp->attr.field = attr->field
    KEEP(IBV_QP_ACCESS_FLAGS, qp_access_flags);
    KEEP(IBV_QP_PKEY_INDEX, pkey_index);
    KEEP(IBV_QP_PORT, port_num);
    KEEP(IBV_QP_QKEY, qkey);
    KEEP(IBV_QP_AV, ah_attr);
    KEEP(IBV_QP_PATH_MTU, path_mtu);
    KEEP(IBV_QP_TIMEOUT, timeout);
    KEEP(IBV_QP_RETRY_CNT, retry_cnt);
    KEEP(IBV_QP_RNR_RETRY, rnr_retry);
    KEEP(IBV_QP_RQ_PSN, rq_psn);
    KEEP(IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic);
    KEEP(IBV_QP_MIN_RNR_TIMER, min_rnr_timer);
    KEEP(IBV_QP_SQ_PSN, sq_psn);
    KEEP(IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic);
    KEEP(IBV_QP_DEST_QPN, dest_qp_num);
    KEEP(IBV_QP_EN_SQD_ASYNC_NOTIFY, en_sqd_async_notify);
    KEEP(IBV_QP_PATH_MIG_STATE, path_mig_state);
#undef KEEP
}

static struct rdmacm_rtr rtr_of(const struct ibv_qp_attr *attr) {
    return (struct rdmacm_rtr){.dest_qp_num = attr->dest_qp_num, .rq_psn = attr->rq_psn,
                               .path_mtu = 128u << attr->path_mtu, .max_dest_rd_atomic = attr->max_dest_rd_atomic,
                               .min_rnr_timer = attr->min_rnr_timer, .access = attr->qp_access_flags,
                               .pkey = RDMACM_DEFAULT_PKEY};
}

static struct rdmacm_rts rts_of(const struct ibv_qp_attr *attr) {
    return (struct rdmacm_rts){.sq_psn = attr->sq_psn, .max_rd_atomic = attr->max_rd_atomic,
                               .retry_cnt = attr->retry_cnt, .rnr_retry = attr->rnr_retry,
                               .timeout = attr->timeout ? 4.096e-6 * (double)(UINT64_C(1) << (attr->timeout & 31)) : 0};
}

/* Change what the engine has of the attributes that a mask names, where it has begun. */
static bool change_engine(struct qp *qp, int mask) {
    if (!qp->conn->rc) {
        if (mask & IBV_QP_QKEY)
            qp->ud.qkey = qp->attr.qkey;
        return true;
    }
    if (mask & IBV_QP_ACCESS_FLAGS)
        qp->rc.access = qp->attr.qp_access_flags;
    if (mask & IBV_QP_MIN_RNR_TIMER)
        qp->rc.min_rnr_timer = qp->attr.min_rnr_timer & 0x1Fu;
    if (qp->ibv.state != IBV_QPS_SQD)
        return true;
    if (mask & RELIABLE_OUT) {
        struct rdmacm_rts rts = rts_of(&qp->attr);
        rdmacm_rc_set_send_attributes(&qp->rc, &rts, rdmacm_now());
    }
    return !(mask & IBV_QP_MAX_DEST_RD_ATOMIC) || rdmacm_rc_set_resources(&qp->rc, qp->attr.max_dest_rd_atomic);
}

static void reset(struct qp *qp, struct rdmacm_wire *wire) {
    if (qp->ibv.recv_cq)
        cq_drop(cq_of(qp->ibv.recv_cq), qp->ibv.qp_num);
    if (qp->ibv.send_cq)
        cq_drop(cq_of(qp->ibv.send_cq), qp->ibv.qp_num);
    rdmacm_wire_detach(qp->conn);
    stop_engine(qp);
    struct rdmacm_conn kept = *qp->conn;
    if (qp->ibv.qp_type != IBV_QPT_UD)
        qp->connection = (struct rdmacm_conn){.owner = qp, .send_cq = kept.send_cq, .recv_cq = kept.recv_cq};
    qp->attr = (struct ibv_qp_attr){0};
    join(qp, wire); /* its number is known, so that takes no memory */
}

/* Packets that have arrived, and ACKs that wait, count before a queue pair ends: an adapter would have dealt with them. */
static void catch_up(const struct qp *qp) {
    struct rdmacm_wire *wire = qp->conn->wire;
    for (size_t i = 0; wire && i < wire->sources_count; i++)
        for (int left = MOST_CAUGHT_UP; left && rdmacm_wire_receive(wire, wire->sources[i].fd, SIZE_MAX); left--) {
        }
    if (wire)
        rdmacm_wire_acknowledge(wire, rdmacm_now());
}

/* Take the engine along to a state; 0 or an errno. */
static int enter(struct qp *qp, enum ibv_qp_state to, struct rdmacm_wire *wire) {
    enum ibv_qp_state from = qp->ibv.state;
    struct rdmacm_conn *conn = qp->conn;
    if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
        catch_up(qp);
    if (to == IBV_QPS_RESET) {
        reset(qp, wire);
    } else if (to == IBV_QPS_ERR) {
        if (conn->rc)
            rdmacm_rc_flush(&qp->rc);
        else
            rdmacm_ud_flush(&qp->ud);
        conn->told_failed = conn->told_send_failed = true; /* the program knows */
        rdmacm_wire_see_engine(conn);
    } else if (to == IBV_QPS_RTR) {
        struct rdmacm_rtr rtr = rtr_of(&qp->attr);
        if (conn->rc && !rdmacm_rc_ready_to_receive(&qp->rc, &rtr))
            return ENOMEM;
        conn->known->accepts = RDMACM_ACCEPTS_ANY;
        conn->tell_first = conn->rc;
    } else if (to == IBV_QPS_RTS && from == IBV_QPS_RTR) {
        struct rdmacm_rts rts = rts_of(&qp->attr);
        if (conn->rc) {
            rdmacm_rc_ready_to_send(&qp->rc, &rts);
        } else {
            qp->ud.psn = qp->attr.sq_psn & RDMACM_PSN_MASK;
            qp->ud.is_ready = true;
        }
    } else if (to == IBV_QPS_SQD) {
        conn->queues->paused = true;
        if (qp->attr.en_sqd_async_notify)
            process_drain(qp);
    } else if (to == IBV_QPS_RTS) {
        conn->queues->paused = conn->queues->send_failed = conn->told_send_failed = false;
        rdmacm_wire_posted(conn, rdmacm_now());
    }
    qp->ibv.state = to;
    return 0;
}

EXPORT int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask) {
    struct qp *qp = qp_of(ibv);
    struct rdmacm_wire *wire = process_wire();
    struct rdmacm_route route;
    uint8_t local[16], remote[16];
    size_t length = 0;
    uint32_t scope = 0;
    if (!wire)
        return ENODEV;
    int code = check_values(attr, mask);
    if (!code && mask & IBV_QP_AV && qp->ibv.qp_type != IBV_QPT_UD)
        code = route_of(ibv->context, &attr->ah_attr, &route, local, remote, &length, &scope);
    if (code)
        return code;
    rdmacm_enter();
    enum ibv_qp_state to = mask & IBV_QP_STATE ? attr->qp_state : ibv->state;
    if ((mask & IBV_QP_CUR_STATE && attr->cur_qp_state != ibv->state) || !may_change(qp, to, mask)) {
        code = EINVAL;
    } else {
        keep_attributes(qp, attr, mask);
        if (length)
            set_route(qp, &route, local, remote, length, scope);
        if (!change_engine(qp, mask))
            code = ENOMEM;
        else if (mask & IBV_QP_STATE)
            code = enter(qp, to, wire);
        process_settle(wire);
    }
    rdmacm_leave();
    return code;
}

bool qp_is_draining(const struct qp *qp) {
    return qp->ibv.state == IBV_QPS_SQD && (qp->conn->rc ? qp->rc.outstanding_count > 0 : false);
}

EXPORT int ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init) {
    struct qp *qp = qp_of(ibv);
    (void)mask;
    rdmacm_enter();
    *attr = qp->attr;
    attr->qp_state = attr->cur_qp_state = ibv->state;
    attr->cap = qp->cap;
    attr->sq_draining = qp_is_draining(qp);
    if (attr->path_mig_state != IBV_MIG_REARM && attr->path_mig_state != IBV_MIG_ARMED)
        attr->path_mig_state = IBV_MIG_MIGRATED;
    *init = (struct ibv_qp_init_attr){.qp_context = ibv->qp_context, .send_cq = ibv->send_cq, .recv_cq = ibv->recv_cq,
                                      .srq = ibv->srq, .cap = qp->cap, .qp_type = ibv->qp_type,
                                      .sq_sig_all = qp->signals_all};
    rdmacm_leave();
    return 0;
}

void qp_failed(struct qp *qp) {
    struct rdmacm_queues *queues = qp->conn->queues;
    if (queues->failed && qp->ibv.state != IBV_QPS_ERR) {
        qp->ibv.state = IBV_QPS_ERR;
        report_async(qp->ibv.context, &(struct ibv_async_event){.element.qp = &qp->ibv, .event_type = IBV_EVENT_QP_FATAL});
    } else if (queues->send_failed && qp->ibv.state == IBV_QPS_RTS) {
        qp->ibv.state = IBV_QPS_SQE;
    }
}

/* Bytes of a packet, as IP counts them, without extended headers and payload. */
static uint32_t headers_of(bool is_ipv6) { return (is_ipv6 ? 40u : 20u) + 8 + RDMACM_BTH_LENGTH + RDMACM_ICRC_LENGTH; }

void qp_tell_hole(uint32_t qp_num) {
    struct run_hole hole = {.qp_num = qp_num};
    rdmacm_enter();
    const struct rdmacm_known *known = rdmacm_wire_find(process_wire(), qp_num);
    struct qp *qp = known && known->conn ? known->conn->owner : NULL;
    bool is_hole = qp && !qp->has_told_hole && rdmacm_wire_has_hole(qp->conn);
    if (is_hole) {
        const struct rdmacm_conn *conn = qp->conn;
        uint32_t headers = headers_of(conn->route.is_ipv6), mtu = conn->rc->path_mtu, length = conn->asked_length;
        qp->has_told_hole = true;
        hole.address_length = conn->route.is_ipv6 ? 16 : 4;
        memcpy(hole.remote, conn->remote, hole.address_length);
        hole.arrived = headers + RDMACM_RETH_LENGTH;
        hole.lost = headers + (length < mtu ? length : mtu);
    }
    rdmacm_leave();
    if (is_hole)
        control(RUN_HOLE, 0, &hole, sizeof hole, NULL, 0);
}

EXPORT int ibv_destroy_qp(struct ibv_qp *ibv) {
    struct qp *qp = qp_of(ibv);
    rdmacm_enter();
    if (qp->groups) {
        rdmacm_leave();
        return EBUSY;
    }
    catch_up(qp);
    if (ibv->recv_cq)
        cq_drop(cq_of(ibv->recv_cq), ibv->qp_num);
    if (ibv->send_cq)
        cq_drop(cq_of(ibv->send_cq), ibv->qp_num);
    process_give_number(qp->slot, ibv->qp_num); /* it leaves the wire */
    stop_engine(qp);
    use(qp, (unsigned)-1);
    process_end_drain(qp);
    rdmacm_leave();
    qp_free_builders(qp);
    free(qp);
    return 0;
}

/* -- what the software device does not have ---------------------------------------------------------------------------- */

EXPORT int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece) { return (void)qp, (void)ece, EOPNOTSUPP; }
EXPORT int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece) { return (void)qp, (void)ece, EOPNOTSUPP; }

EXPORT int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode opcode, uint32_t flags) {
    return (void)qp, (void)opcode, (void)flags, 0;
}
