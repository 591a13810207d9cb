/* librdmacm: multicast groups. */
#include "cm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* -- joining ------------------------------------------------------------------------------------------------------- */

/* Forget a membership that has no events. */
static void drop(struct cm_group *group) {
    cm_lock();
    struct cm_group **link = &group->id->groups;
    while (*link != group)
        link = &(*link)->next;
    *link = group->next;
    cm_target_remove(&group->target);
    cm_unlock();
    free(group);
}

static struct cm_group *add(struct cm_id *id, const struct sockaddr *address, size_t length, bool is_send_only,
                            void *context) {
    struct cm_group *group = calloc(1, sizeof *group);
    if (!group)
        return NULL;
    *group = (struct cm_group){.target.is_group = true, .id = id, .is_send_only = is_send_only, .context = context};
    memcpy(&group->address, address, length);
    if (!cm_target_add(&group->target)) {
        free(group);
        return NULL;
    }
    cm_lock();
    group->next = id->groups;
    id->groups = group;
    cm_unlock();
    return group;
}

static int join(struct cm_id *id, const struct sockaddr *address, uint16_t flags, void *context) {
    size_t length = cm_address_length(address);
    if (!length)
        return fail(EINVAL);
    struct cm_group *group = add(id, address, length, flags == RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER, context);
    if (!group)
        return fail(ENOMEM);
    struct rdma_ucm_join_mcast command = {
        .uid = group->target.uid, .id = id->handle, .addr_size = (uint16_t)length, .join_flags = flags};
    memcpy(&command.addr, address, length);
    struct rdma_ucm_create_id_resp reply;
    bool waits = id->is_synchronous;
    if (cm_ask(id, RDMA_USER_CM_CMD_JOIN_MCAST, &command, sizeof command, &reply, sizeof reply)) {
        int code = errno;
        drop(group);
        return fail(code);
    }
    group->handle = reply.id;
    return waits ? cm_complete(id) : 0;
}

EXPORT int rdma_join_multicast(struct rdma_cm_id *id, struct sockaddr *address, void *context) {
    return join(cm_id_of(id), address, RDMA_MC_JOIN_FLAG_FULLMEMBER, context);
}

EXPORT int rdma_join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attributes, void *context) {
    const uint32_t needed = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
    if (attributes->comp_mask >= RDMA_CM_JOIN_MC_ATTR_RESERVED)
        return fail(ENOTSUP);
    if ((attributes->comp_mask & needed) != needed || attributes->join_flags >= RDMA_MC_JOIN_FLAG_RESERVED)
        return fail(EINVAL);
    return join(cm_id_of(id), attributes->addr, (uint16_t)attributes->join_flags, context);
}

int cm_finish_join(struct cm_group *group, const struct rdma_ud_param *param) {
    group->gid = param->ah_attr.grh.dgid;
    group->lid = param->ah_attr.dlid;
    struct ibv_qp *qp = group->id->id.qp;
    if (!qp || group->is_send_only)
        return 0;
    int code = ibv_attach_mcast(qp, &group->gid, group->lid);
    group->is_attached = !code;
    return code ? fail(code) : 0;
}

/* -- leaving ------------------------------------------------------------------------------------------------------- */

/* The membership of an address, as it was given. */
static struct cm_group *find(struct cm_id *id, const struct sockaddr *address, size_t length) {
    cm_lock();
    struct cm_group *group = id->groups;
    while (group && memcmp(&group->address, address, length))
        group = group->next;
    cm_unlock();
    return group;
}

EXPORT int rdma_leave_multicast(struct rdma_cm_id *rdma_id, struct sockaddr *address) {
    struct cm_id *id = cm_id_of(rdma_id);
    size_t length = cm_address_length(address);
    struct cm_group *group = length ? find(id, address, length) : NULL;
    if (!group)
        return fail(length ? EADDRNOTAVAIL : EINVAL);
    if (group->is_attached && rdma_id->qp)
        ibv_detach_mcast(rdma_id->qp, &group->gid, group->lid);
    struct rdma_ucm_destroy_id command = {.id = group->handle};
    struct rdma_ucm_destroy_id_resp reply;
    int result = cm_ask(id, RDMA_USER_CM_CMD_LEAVE_MCAST, &command, sizeof command, &reply, sizeof reply);
    int code = errno;
    cm_lock();
    cm_wait_for_acknowledgements(&group->target);
    cm_unlock();
    drop(group);
    return result ? fail(code) : 0;
}

void cm_free_groups(struct cm_id *id) {
    while (id->groups) {
        struct cm_group *group = id->groups;
        id->groups = group->next;
        cm_target_remove(&group->target);
        free(group);
    }
}
