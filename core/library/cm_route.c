/* librdmacm: addresses, devices and routes of ids. */
#include "cm.h"

#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PATHS = 6, PATH_EXACTLY = 2, PATH_VALUE = 0x3F };

size_t cm_address_length(const struct sockaddr *address) {
    switch (address ? address->sa_family : AF_UNSPEC) {
    case AF_INET: return sizeof(struct sockaddr_in);
    case AF_INET6: return sizeof(struct sockaddr_in6);
    case CM_AF_IB: return sizeof(struct sockaddr_ib);
    default: return 0;
    }
}

/* -- what the server knows of an id -------------------------------------------------------------------------------- */

static int query(const struct cm_id *id, uint32_t option, void *reply, size_t size) {
    struct rdma_ucm_query command = {.id = id->handle, .option = option};
    return cm_ask(id, RDMA_USER_CM_CMD_QUERY, &command, sizeof command, reply, size);
}

static void copy_address(struct sockaddr_storage *to, const struct __kernel_sockaddr_storage *from, uint16_t size) {
    memcpy(to, from, size < sizeof *to ? size : sizeof *to);
}

static int query_gids(struct cm_id *id) {
    struct rdma_ucm_query_addr_resp reply;
    if (query(id, RDMA_USER_CM_QUERY_GID, &reply, sizeof reply))
        return -1;
    struct rdma_ib_addr *to = &id->id.route.addr.addr.ibaddr;
    memcpy(&to->sgid, (uint8_t *)&reply.src_addr + offsetof(struct sockaddr_ib, sib_addr), sizeof to->sgid);
    memcpy(&to->dgid, (uint8_t *)&reply.dst_addr + offsetof(struct sockaddr_ib, sib_addr), sizeof to->dgid);
    return 0;
}

/* An id gets its device once. */
static int set_device(struct rdma_cm_id *id, const struct rdma_ucm_query_addr_resp *reply) {
    if (id->verbs || !reply->node_guid)
        return 0;
    struct ibv_context *context =
        reply->ibdev_index == UINT32_MAX ? library_context_of(reply->node_guid) : library_context(reply->ibdev_index);
    struct ibv_pd *pd = context ? cm_default_pd(context) : NULL;
    if (!pd)
        return -1;
    id->port_num = reply->port_num;
    id->pd = pd;
    id->verbs = context;
    return 0;
}

int cm_query_address(struct cm_id *id) {
    struct rdma_ucm_query_addr_resp reply;
    if (query(id, RDMA_USER_CM_QUERY_ADDR, &reply, sizeof reply))
        return -1;
    struct rdma_addr *to = &id->id.route.addr;
    copy_address(&to->src_storage, &reply.src_addr, reply.src_size);
    copy_address(&to->dst_storage, &reply.dst_addr, reply.dst_size);
    to->addr.ibaddr.pkey = reply.pkey;
    return set_device(&id->id, &reply) || query_gids(id) ? -1 : 0;
}

static struct ibv_sa_path_rec path_of(const struct ib_path_rec_data *data) {
    struct ibv_path_record from;
    memcpy(&from, data->path_rec, sizeof from);
    uint32_t flow = be32toh(from.flowlabel_hoplimit);
    return (struct ibv_sa_path_rec){
        .dgid = from.dgid, .sgid = from.sgid, .dlid = from.dlid, .slid = from.slid, .flow_label = htobe32(flow >> 8),
        .hop_limit = (uint8_t)flow, .traffic_class = from.tclass, .reversible = from.reversible_numpath >> 7,
        .numb_path = 1, .pkey = from.pkey, .sl = be16toh(from.qosclass_sl) & 0xF, .mtu_selector = PATH_EXACTLY,
        .mtu = from.mtu & PATH_VALUE, .rate_selector = PATH_EXACTLY, .rate = from.rate & PATH_VALUE,
        .packet_life_time_selector = PATH_EXACTLY, .packet_life_time = from.packetlifetime & PATH_VALUE,
        .preference = from.preference};
}

int cm_query_path(struct cm_id *id) {
    struct {
        struct rdma_ucm_query_path_resp head;
        struct ib_path_rec_data data[MOST_PATHS];
    } reply;
    if (query(id, RDMA_USER_CM_QUERY_PATH, &reply, sizeof reply))
        return -1;
    uint32_t count = reply.head.num_paths < MOST_PATHS ? reply.head.num_paths : MOST_PATHS;
    if (!count)
        return 0;
    struct ibv_sa_path_rec *paths = calloc(count, sizeof *paths);
    if (!paths)
        return fail(ENOMEM);
    for (uint32_t i = 0; i < count; i++)
        paths[i] = path_of(&reply.data[i]);
    free(id->id.route.path_rec);
    id->id.route.path_rec = paths;
    id->id.route.num_paths = (int)count;
    return 0;
}

/* -- calls --------------------------------------------------------------------------------------------------------- */

EXPORT int rdma_bind_addr(struct rdma_cm_id *rdma_id, struct sockaddr *address) {
    struct cm_id *id = cm_id_of(rdma_id);
    size_t length = cm_address_length(address);
    if (!length)
        return fail(EINVAL);
    struct rdma_ucm_bind command = {.id = id->handle, .addr_size = (uint16_t)length};
    memcpy(&command.addr, address, length);
    if (cm_tell(id, RDMA_USER_CM_CMD_BIND, &command, sizeof command))
        return -1;
    return cm_query_address(id);
}

EXPORT int rdma_resolve_addr(struct rdma_cm_id *rdma_id, struct sockaddr *source, struct sockaddr *destination,
                             int timeout_ms) {
    struct cm_id *id = cm_id_of(rdma_id);
    size_t source_length = cm_address_length(source), length = cm_address_length(destination);
    if (!length || (source && !source_length))
        return fail(EINVAL);
    struct rdma_ucm_resolve_addr command = {.id = id->handle, .timeout_ms = (uint32_t)timeout_ms,
                                            .src_size = (uint16_t)source_length, .dst_size = (uint16_t)length};
    if (source)
        memcpy(&command.src_addr, source, source_length);
    memcpy(&command.dst_addr, destination, length);
    memcpy(&rdma_id->route.addr.dst_storage, destination, length);
    return cm_do(id, RDMA_USER_CM_CMD_RESOLVE_ADDR, &command, sizeof command);
}

EXPORT int rdma_resolve_route(struct rdma_cm_id *rdma_id, int timeout_ms) {
    struct cm_id *id = cm_id_of(rdma_id);
    struct rdma_ucm_resolve_route command = {.id = id->handle, .timeout_ms = (uint32_t)timeout_ms};
    return cm_do(id, RDMA_USER_CM_CMD_RESOLVE_ROUTE, &command, sizeof command);
}

EXPORT int rdma_listen(struct rdma_cm_id *rdma_id, int backlog) {
    struct cm_id *id = cm_id_of(rdma_id);
    struct rdma_ucm_listen command = {.id = id->handle, .backlog = (uint32_t)backlog};
    if (cm_tell(id, RDMA_USER_CM_CMD_LISTEN, &command, sizeof command))
        return -1;
    return cm_query_address(id);
}
