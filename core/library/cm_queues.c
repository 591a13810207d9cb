/* librdmacm: queue pairs, completion queues and shared receive queues of ids. */
#include "cm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

/* -- what a device has once ---------------------------------------------------------------------------------------- */

/* Contexts of library_context() are never closed, so neither are these. */
struct domain {
    struct domain *next;
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_xrcd *xrcd; /* NULL: nobody has asked for it */
};
static struct domain *domains;

static struct verbs_context *extended(struct ibv_context *context) {
    return (struct verbs_context *)(void *)((char *)context - offsetof(struct verbs_context, context));
}

/* With the lock. */
static struct domain *find_domain(struct ibv_context *context) {
    struct domain *domain = domains;
    while (domain && domain->context != context)
        domain = domain->next;
    if (domain)
        return domain;
    domain = calloc(1, sizeof *domain);
    if (domain)
        domain->pd = ibv_alloc_pd(context);
    if (!domain || !domain->pd) {
        free(domain);
        return NULL;
    }
    domain->context = context;
    domain->next = domains;
    return domains = domain;
}

struct ibv_pd *cm_default_pd(struct ibv_context *context) {
    cm_lock();
    const struct domain *domain = find_domain(context);
    cm_unlock();
    return domain ? domain->pd : NULL;
}

static struct ibv_xrcd *default_xrcd(struct ibv_context *context) {
    struct ibv_xrcd_init_attr attributes = {
        .comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS, .fd = -1, .oflags = O_CREAT};
    cm_lock();
    struct domain *domain = find_domain(context);
    if (domain && !domain->xrcd)
        domain->xrcd = extended(context)->open_xrcd(context, &attributes);
    cm_unlock();
    return domain ? domain->xrcd : NULL;
}

/* -- completion queues --------------------------------------------------------------------------------------------- */

static void destroy_cq(struct ibv_cq **cq, struct ibv_comp_channel **channel) {
    if (*cq)
        ibv_destroy_cq(*cq);
    if (*channel)
        ibv_destroy_comp_channel(*channel);
    *cq = NULL;
    *channel = NULL;
}

/* Those of the id, when nothing of it uses them. */
static void destroy_cqs(struct rdma_cm_id *id) {
    if (id->qp || (id->srq && id->qp_type == IBV_QPT_XRC_RECV))
        return;
    if (id->recv_cq == id->send_cq)
        id->recv_cq = NULL;
    if (id->recv_cq_channel == id->send_cq_channel)
        id->recv_cq_channel = NULL;
    destroy_cq(&id->recv_cq, &id->recv_cq_channel);
    destroy_cq(&id->send_cq, &id->send_cq_channel);
}

static int create_cq(struct rdma_cm_id *id, uint32_t size, struct ibv_cq **cq, struct ibv_comp_channel **channel) {
    if (!size)
        return 0;
    *channel = ibv_create_comp_channel(id->verbs);
    *cq = *channel ? ibv_create_cq(id->verbs, (int)size, id, *channel, 0) : NULL;
    return *cq ? 0 : -1;
}

static int create_cqs(struct rdma_cm_id *id, uint32_t send_size, uint32_t recv_size) {
    if (!create_cq(id, recv_size, &id->recv_cq, &id->recv_cq_channel) &&
        !create_cq(id, send_size, &id->send_cq, &id->send_cq_channel))
        return 0;
    int code = errno;
    destroy_cqs(id);
    return fail(code);
}

/* -- attributes ---------------------------------------------------------------------------------------------------- */

void cm_copy_ah_attr(struct ibv_ah_attr *to, const struct ib_uverbs_ah_attr *from) {
    *to = (struct ibv_ah_attr){
        .grh = {.flow_label = from->grh.flow_label, .sgid_index = from->grh.sgid_index,
                .hop_limit = from->grh.hop_limit, .traffic_class = from->grh.traffic_class},
        .dlid = from->dlid, .sl = from->sl, .src_path_bits = from->src_path_bits, .static_rate = from->static_rate,
        .is_global = from->is_global, .port_num = from->port_num};
    memcpy(&to->grh.dgid, from->grh.dgid, sizeof to->grh.dgid);
}

static void copy_attributes(struct ibv_qp_attr *to, const struct ib_uverbs_qp_attr *from) {
    *to = (struct ibv_qp_attr){
        .qp_state = from->qp_state, .cur_qp_state = from->cur_qp_state, .path_mtu = from->path_mtu,
        .path_mig_state = from->path_mig_state, .qkey = from->qkey, .rq_psn = from->rq_psn, .sq_psn = from->sq_psn,
        .dest_qp_num = from->dest_qp_num, .qp_access_flags = from->qp_access_flags,
        .cap = {.max_send_wr = from->max_send_wr, .max_recv_wr = from->max_recv_wr, .max_send_sge = from->max_send_sge,
                .max_recv_sge = from->max_recv_sge, .max_inline_data = from->max_inline_data},
        .pkey_index = from->pkey_index, .alt_pkey_index = from->alt_pkey_index,
        .en_sqd_async_notify = from->en_sqd_async_notify, .sq_draining = from->sq_draining,
        .max_rd_atomic = from->max_rd_atomic, .max_dest_rd_atomic = from->max_dest_rd_atomic,
        .min_rnr_timer = from->min_rnr_timer, .port_num = from->port_num, .timeout = from->timeout,
        .retry_cnt = from->retry_cnt, .rnr_retry = from->rnr_retry, .alt_port_num = from->alt_port_num,
        .alt_timeout = from->alt_timeout};
    cm_copy_ah_attr(&to->ah_attr, &from->ah_attr);
    cm_copy_ah_attr(&to->alt_ah_attr, &from->alt_ah_attr);
}

EXPORT int rdma_init_qp_attr(struct rdma_cm_id *rdma_id, struct ibv_qp_attr *attributes, int *mask) {
    struct cm_id *id = cm_id_of(rdma_id);
    struct rdma_ucm_init_qp_attr command = {.id = id->handle, .qp_state = attributes->qp_state};
    struct ib_uverbs_qp_attr reply;
    if (cm_ask(id, RDMA_USER_CM_CMD_INIT_QP_ATTR, &command, sizeof command, &reply, sizeof reply))
        return -1;
    copy_attributes(attributes, &reply);
    *mask = (int)reply.qp_attr_mask;
    return 0;
}

/* -- states of queue pairs ----------------------------------------------------------------------------------------- */

static int modify(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask) {
    int code = ibv_modify_qp(qp, attributes, mask);
    return code ? fail(code) : 0;
}

/* Take the queue pair to a state that the connection knows the attributes of. */
static int enter(struct rdma_cm_id *id, enum ibv_qp_state state, uint8_t responder_resources, uint8_t initiator_depth) {
    struct ibv_qp_attr attributes = {.qp_state = state};
    int mask;
    if (rdma_init_qp_attr(id, &attributes, &mask))
        return -1;
    if (responder_resources != RDMA_MAX_RESP_RES)
        attributes.max_dest_rd_atomic = responder_resources;
    if (initiator_depth != RDMA_MAX_INIT_DEPTH)
        attributes.max_rd_atomic = initiator_depth;
    return modify(id->qp, &attributes, mask);
}

int cm_connect_queue_pair(struct cm_id *id, uint8_t responder_resources, uint8_t initiator_depth) {
    static const enum ibv_qp_state states[] = {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS};
    for (size_t i = 0; id->id.qp && i < sizeof states / sizeof *states; i++)
        if (enter(&id->id, states[i], responder_resources, initiator_depth))
            return -1;
    return 0;
}

int cm_fail_queue_pair(struct cm_id *id) {
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_ERR};
    return id->id.qp ? modify(id->id.qp, &attributes, IBV_QP_STATE) : 0;
}

/* A connected queue pair takes receives then, a datagram one sends too. */
static int make_ready(struct rdma_cm_id *id) {
    if (enter(id, IBV_QPS_INIT, RDMA_MAX_RESP_RES, RDMA_MAX_INIT_DEPTH))
        return -1;
    if (!cm_is_datagram(id))
        return 0;
    struct ibv_qp_attr attributes = {.qp_state = IBV_QPS_RTR};
    if (modify(id->qp, &attributes, IBV_QP_STATE))
        return -1;
    attributes.qp_state = IBV_QPS_RTS;
    return modify(id->qp, &attributes, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

/* -- queue pairs --------------------------------------------------------------------------------------------------- */

/* Fill in what the caller leaves to the id: protection domain, XRC domain, queues. */
static int complete_attributes(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attributes) {
    bool is_target = attributes->qp_type == IBV_QPT_XRC_RECV;
    if (!(attributes->comp_mask & IBV_QP_INIT_ATTR_PD) || !attributes->pd)
        attributes->pd = id->pd;
    attributes->comp_mask |= IBV_QP_INIT_ATTR_PD;
    if (attributes->pd->context != id->verbs)
        return fail(EINVAL);
    if ((id->send_cq && attributes->send_cq && id->send_cq != attributes->send_cq) ||
        (id->recv_cq && attributes->recv_cq && id->recv_cq != attributes->recv_cq))
        return fail(EINVAL);
    if (is_target && !(attributes->comp_mask & IBV_QP_INIT_ATTR_XRCD)) {
        attributes->comp_mask |= IBV_QP_INIT_ATTR_XRCD;
        attributes->xrcd = default_xrcd(id->verbs);
        if (!attributes->xrcd)
            return -1;
    }
    if (is_target)
        return 0;
    bool has_recvs = attributes->qp_type != IBV_QPT_XRC_SEND;
    if (create_cqs(id, attributes->send_cq || id->send_cq ? 0 : attributes->cap.max_send_wr,
                   attributes->recv_cq || id->recv_cq || !has_recvs ? 0 : attributes->cap.max_recv_wr))
        return -1;
    if (!attributes->send_cq)
        attributes->send_cq = id->send_cq;
    if (!attributes->recv_cq)
        attributes->recv_cq = id->recv_cq;
    if (!attributes->srq)
        attributes->srq = id->srq;
    return 0;
}

EXPORT int rdma_create_qp_ex(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attributes) {
    if (id->qp || !id->verbs)
        return fail(EINVAL);
    if (!complete_attributes(id, attributes) && (id->qp = extended(id->verbs)->create_qp_ex(id->verbs, attributes)) &&
        !make_ready(id)) {
        id->pd = attributes->pd;
        return 0;
    }
    int code = errno;
    rdma_destroy_qp(id);
    return fail(code);
}

EXPORT int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attributes) {
    struct ibv_qp_init_attr_ex copy = {
        .qp_context = attributes->qp_context, .send_cq = attributes->send_cq, .recv_cq = attributes->recv_cq,
        .srq = attributes->srq, .cap = attributes->cap, .qp_type = attributes->qp_type,
        .sq_sig_all = attributes->sq_sig_all, .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = pd};
    if (rdma_create_qp_ex(id, &copy))
        return -1;
    attributes->send_cq = copy.send_cq;
    attributes->recv_cq = copy.recv_cq;
    attributes->srq = copy.srq;
    attributes->cap = copy.cap;
    return 0;
}

EXPORT void rdma_destroy_qp(struct rdma_cm_id *id) {
    if (id->qp)
        ibv_destroy_qp(id->qp);
    id->qp = NULL;
    destroy_cqs(id);
}

/* -- shared receive queues ----------------------------------------------------------------------------------------- */

static int complete_srq_attributes(struct rdma_cm_id *id, struct ibv_srq_init_attr_ex *attributes) {
    if (!(attributes->comp_mask & IBV_SRQ_INIT_ATTR_PD) || !attributes->pd)
        attributes->pd = id->pd;
    attributes->comp_mask |= IBV_SRQ_INIT_ATTR_PD;
    if (attributes->srq_type != IBV_SRQT_XRC)
        return 0;
    if (!(attributes->comp_mask & IBV_SRQ_INIT_ATTR_XRCD) || !attributes->xrcd)
        attributes->xrcd = default_xrcd(id->verbs);
    if (!attributes->xrcd)
        return -1;
    if (!(attributes->comp_mask & IBV_SRQ_INIT_ATTR_CQ) || !attributes->cq) {
        if (create_cqs(id, 0, id->recv_cq ? 0 : attributes->attr.max_wr))
            return -1;
        attributes->cq = id->recv_cq;
    }
    attributes->comp_mask |= IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    return 0;
}

EXPORT int rdma_create_srq_ex(struct rdma_cm_id *id, struct ibv_srq_init_attr_ex *attributes) {
    if (!(attributes->comp_mask & IBV_SRQ_INIT_ATTR_TYPE) || id->srq || !id->verbs)
        return fail(EINVAL);
    if (!complete_srq_attributes(id, attributes) &&
        (id->srq = extended(id->verbs)->create_srq_ex(id->verbs, attributes))) {
        if (!id->pd)
            id->pd = attributes->pd;
        return 0;
    }
    int code = errno;
    destroy_cqs(id);
    return fail(code);
}

EXPORT int rdma_create_srq(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_srq_init_attr *attributes) {
    struct ibv_srq_init_attr_ex copy = {
        .srq_context = attributes->srq_context, .attr = attributes->attr,
        .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD, .pd = pd,
        .srq_type = id->qp_type == IBV_QPT_XRC_RECV ? IBV_SRQT_XRC : IBV_SRQT_BASIC};
    if (rdma_create_srq_ex(id, &copy))
        return -1;
    attributes->attr = copy.attr;
    return 0;
}

EXPORT void rdma_destroy_srq(struct rdma_cm_id *id) {
    if (id->srq)
        ibv_destroy_srq(id->srq);
    id->srq = NULL;
    destroy_cqs(id);
}
