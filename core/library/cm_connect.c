/* librdmacm: connecting, accepting, disconnecting. */
#include "cm.h"

#include <errno.h>
#include <string.h>

enum { MOST_RETRIES = 7 };

/* -- parameters ---------------------------------------------------------------------------------------------------- */

static uint8_t at_most_255(int number) { return (uint8_t)(number < 0 ? 0 : number > UINT8_MAX ? UINT8_MAX : number); }

/* The most READs and atomic operations of the device: as responder, as initiator. */
static int query_limits(const struct rdma_cm_id *id, uint8_t *responder_resources, uint8_t *initiator_depth) {
    struct ibv_device_attr device;
    if (!id->verbs)
        return fail(EINVAL);
    int code = ibv_query_device(id->verbs, &device);
    if (code)
        return fail(code);
    *responder_resources = at_most_255(device.max_qp_rd_atom);
    *initiator_depth = at_most_255(device.max_qp_init_rd_atom);
    return 0;
}

/* What rdma_connect(3) and rdma_accept(3) say of these is of RDMA_PS_TCP. */
static bool is_valid(const struct rdma_cm_id *id, const struct rdma_conn_param *param, uint8_t most_resources,
                     uint8_t most_depth) {
    if (id->ps != RDMA_PS_TCP)
        return true;
    if (!param)
        return id->qp;
    return (param->responder_resources == RDMA_MAX_RESP_RES || param->responder_resources <= most_resources) &&
           (param->initiator_depth == RDMA_MAX_INIT_DEPTH || param->initiator_depth <= most_depth);
}

/* A queue pair of the id is what counts: programs leave anything in `qp_num` beside it. */
static int set_parameters(const struct cm_id *id, const struct rdma_conn_param *from, struct rdma_ucm_conn_param *to) {
    const struct ibv_qp *qp = id->id.qp;
    *to = (struct rdma_ucm_conn_param){
        .qp_num = qp ? qp->qp_num : from ? from->qp_num : 0, .srq = qp ? qp->srq != NULL : from ? from->srq : 0,
        .responder_resources = id->responder_resources, .initiator_depth = id->initiator_depth,
        .flow_control = from ? from->flow_control : 0, .retry_count = from ? from->retry_count : MOST_RETRIES,
        .rnr_retry_count = from ? from->rnr_retry_count : MOST_RETRIES, .valid = 1};
    size_t length = from && from->private_data ? from->private_data_len : 0, before = id->connect_length;
    if (before + length > CM_MOST_PRIVATE_DATA)
        return fail(EINVAL);
    if (before)
        memcpy(to->private_data, id->connect_data, before);
    if (length)
        memcpy(to->private_data + before, from->private_data, length);
    to->private_data_len = (uint8_t)(before + length);
    return 0;
}

static struct rdma_ucm_ece ece_of(const struct cm_id *id) {
    return (struct rdma_ucm_ece){.vendor_id = id->local_ece.vendor_id, .attr_mod = id->local_ece.options};
}

/* -- connecting ---------------------------------------------------------------------------------------------------- */

EXPORT int rdma_connect(struct rdma_cm_id *rdma_id, struct rdma_conn_param *param) {
    struct cm_id *id = cm_id_of(rdma_id);
    uint8_t resources, depth;
    if (query_limits(rdma_id, &resources, &depth))
        return -1;
    if (!is_valid(rdma_id, param, resources, depth))
        return fail(EINVAL);
    bool has_resources = param && param->responder_resources != RDMA_MAX_RESP_RES;
    bool has_depth = param && param->initiator_depth != RDMA_MAX_INIT_DEPTH;
    id->responder_resources = has_resources ? param->responder_resources : resources;
    id->initiator_depth = has_depth ? param->initiator_depth : depth;
    struct rdma_ucm_connect command = {.id = id->handle, .ece = ece_of(id)};
    if (set_parameters(id, param, &command.conn_param))
        return -1;
    return cm_do(id, RDMA_USER_CM_CMD_CONNECT, &command, sizeof command);
}

/* Tell the peer that the connection is ready: an ACCEPT without parameters. */
static int tell_ready(const struct cm_id *id) {
    struct rdma_ucm_accept command = {.uid = id->target.uid, .id = id->handle};
    return cm_tell(id, RDMA_USER_CM_CMD_ACCEPT, &command, sizeof command);
}

int cm_finish_connect(struct cm_id *id) {
    if (!cm_connect_queue_pair(id, RDMA_MAX_RESP_RES, RDMA_MAX_INIT_DEPTH) && !tell_ready(id))
        return 0;
    int code = errno;
    cm_fail_queue_pair(id);
    return fail(code);
}

EXPORT int rdma_establish(struct rdma_cm_id *id) { return id->qp ? fail(EINVAL) : tell_ready(cm_id_of(id)); }

/* -- the passive side ---------------------------------------------------------------------------------------------- */

static int accept_request(struct cm_id *id, const struct rdma_conn_param *param) {
    struct rdma_ucm_accept command = {.uid = id->target.uid, .id = id->handle, .ece = ece_of(id)};
    if (set_parameters(id, param, &command.conn_param))
        return -1;
    if (cm_is_datagram(&id->id))
        return cm_tell(id, RDMA_USER_CM_CMD_ACCEPT, &command, sizeof command);
    if (!cm_connect_queue_pair(id, id->responder_resources, id->initiator_depth))
        return cm_do(id, RDMA_USER_CM_CMD_ACCEPT, &command, sizeof command);
    return -1;
}

EXPORT int rdma_accept(struct rdma_cm_id *rdma_id, struct rdma_conn_param *param) {
    struct cm_id *id = cm_id_of(rdma_id);
    uint8_t resources, depth;
    if (query_limits(rdma_id, &resources, &depth))
        return -1;
    if (!is_valid(rdma_id, param, resources, depth))
        return fail(EINVAL);
    if (param && param->responder_resources != RDMA_MAX_RESP_RES)
        id->responder_resources = param->responder_resources;
    else if (id->responder_resources > resources)
        id->responder_resources = resources;
    if (param && param->initiator_depth != RDMA_MAX_INIT_DEPTH)
        id->initiator_depth = param->initiator_depth;
    else if (id->initiator_depth > depth)
        id->initiator_depth = depth;
    return accept_request(id, param);
}

static int reject(struct rdma_cm_id *rdma_id, const void *data, uint8_t length, uint8_t reason) {
    struct cm_id *id = cm_id_of(rdma_id);
    struct rdma_ucm_reject command = {.id = id->handle, .private_data_len = data ? length : 0, .reason = reason};
    if (data)
        memcpy(command.private_data, data, length);
    return cm_tell(id, RDMA_USER_CM_CMD_REJECT, &command, sizeof command);
}

EXPORT int rdma_reject(struct rdma_cm_id *id, const void *data, uint8_t length) {
    return reject(id, data, length, CM_REASON_CONSUMER);
}

EXPORT int rdma_reject_ece(struct rdma_cm_id *id, const void *data, uint8_t length) {
    return reject(id, data, length, CM_REASON_ECE);
}

/* -- the end ------------------------------------------------------------------------------------------------------- */

EXPORT int rdma_disconnect(struct rdma_cm_id *rdma_id) {
    struct cm_id *id = cm_id_of(rdma_id);
    if (!rdma_id->verbs)
        return fail(EINVAL);
    if (cm_fail_queue_pair(id))
        return -1;
    struct rdma_ucm_disconnect command = {.id = id->handle};
    return cm_do(id, RDMA_USER_CM_CMD_DISCONNECT, &command, sizeof command);
}

/* -- enhanced connection establishment ----------------------------------------------------------------------------- */

EXPORT int rdma_set_local_ece(struct rdma_cm_id *id, struct ibv_ece *ece) {
    if (!id || id->qp || !ece || !ece->vendor_id || ece->comp_mask)
        return fail(EINVAL);
    cm_id_of(id)->local_ece = *ece;
    return 0;
}

EXPORT int rdma_get_remote_ece(struct rdma_cm_id *id, struct ibv_ece *ece) {
    if (!id || id->qp || !ece)
        return fail(EINVAL);
    *ece = cm_id_of(id)->remote_ece;
    return 0;
}
