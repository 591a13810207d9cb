/* rsocket(7): the queue pair of a local address, by which datagrams come and go, and addresses. */
#include "rs_end.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* -- addresses ------------------------------------------------------------------------------------------------------- */

struct rs_peer_key rs_key_of(const struct sockaddr_storage *address) {
    struct rs_peer_key key = {.version = 4};
    if (address->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)address;
        memcpy(key.address, &in->sin_addr, sizeof in->sin_addr);
        key.port = ntohs(in->sin_port);
        return key;
    }
    const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)address;
    key.version = 6;
    memcpy(key.address, &in6->sin6_addr, sizeof in6->sin6_addr);
    key.port = ntohs(in6->sin6_port);
    key.scope = IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr) ? in6->sin6_scope_id : 0;
    return key;
}

struct sockaddr_storage rs_address_of(const struct rs_peer_key *key, uint32_t flow) {
    struct sockaddr_storage address = {0};
    if (key->version == 4) {
        struct sockaddr_in *in = (struct sockaddr_in *)&address;
        in->sin_family = AF_INET;
        in->sin_port = htons(key->port);
        memcpy(&in->sin_addr, key->address, sizeof in->sin_addr);
        return address;
    }
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&address;
    in6->sin6_family = AF_INET6;
    in6->sin6_port = htons(key->port);
    in6->sin6_flowinfo = htonl(flow);
    in6->sin6_scope_id = key->scope;
    memcpy(&in6->sin6_addr, key->address, sizeof in6->sin6_addr);
    return address;
}

uint16_t *rs_port_in(struct sockaddr_storage *address) {
    return address->ss_family == AF_INET ? &((struct sockaddr_in *)address)->sin_port
                                         : &((struct sockaddr_in6 *)address)->sin6_port;
}

bool rs_is_any(const struct sockaddr_storage *address) {
    return address->ss_family == AF_INET ? ((const struct sockaddr_in *)address)->sin_addr.s_addr == INADDR_ANY
                                         : IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

/* -- queue pairs ----------------------------------------------------------------------------------------------------- */

void rs_end_post_receive(struct rs_end *end, uint32_t slot) {
    struct ibv_sge piece = {.addr = (uintptr_t)end->memory + (size_t)slot * RS_SLOT, .length = RS_SLOT, .lkey = end->mr->lkey};
    struct ibv_recv_wr request = {.wr_id = slot, .sg_list = &piece, .num_sge = 1}, *bad;
    verbs_post_recv(end->id->qp, &request, &bad); /* of a queue pair that has failed a completion tells */
}

void rs_end_close(struct rs_end *end) {
    int code = errno;
    if (end->id && end->id->qp)
        rdma_destroy_qp(end->id);
    if (end->mr)
        ibv_dereg_mr(end->mr);
    if (end->cq)
        ibv_destroy_cq(end->cq);
    if (end->comp_channel)
        ibv_destroy_comp_channel(end->comp_channel);
    if (end->pd)
        ibv_dealloc_pd(end->pd);
    if (end->id)
        rdma_destroy_id(end->id);
    if (end->memory)
        munmap(end->memory, (size_t)(end->receives + end->sends) * RS_SLOT);
    free(end->free_slots);
    free(end);
    errno = code;
}

static uint32_t fitted(int queue, int buffer, int most) {
    int count = queue < most ? queue : most;
    count = count < buffer / RS_MOST_DATAGRAM ? count : buffer / RS_MOST_DATAGRAM;
    return count > 1 ? (uint32_t)count : 1;
}

int rs_gid_index(struct ibv_context *context, uint8_t port_num, const union ibv_gid *gid) {
    struct ibv_port_attr port;
    union ibv_gid each;
    if (verbs_query_port(context, port_num, &port, sizeof port))
        return -1;
    for (int index = 0; index < port.gid_tbl_len; index++)
        if (!ibv_query_gid(context, port_num, index, &each) && !memcmp(&each, gid, sizeof each))
            return index;
    return -1;
}

/* The device of an id that is bound. One that is bound to a loopback address has none, as in the kernel; -1 with errno. */
static int find_device(struct rdma_cm_id *id) {
    int count;
    if (id->verbs)
        return 0;
    struct ibv_context **all = library_contexts(&count);
    for (int i = 0; i < count && !id->verbs; i++)
        if (rs_gid_index(all[i], 1, &id->route.addr.addr.ibaddr.sgid) >= 0) {
            id->verbs = all[i];
            id->port_num = 1;
        }
    free(all);
    return id->verbs ? 0 : fail(ENODEV);
}

/* Make the queue pair of an id that is bound; -1 with errno. */
static int open_queue_pair(struct rs_end *end, const struct rs_options *options) {
    struct ibv_device_attr device;
    struct ibv_port_attr port;
    if (find_device(end->id))
        return -1;
    struct ibv_context *context = end->id->verbs;
    int code = ibv_query_device(context, &device);
    if (!code)
        code = verbs_query_port(context, end->id->port_num, &port, sizeof port);
    if (code)
        return fail(code);
    end->receives = fitted(options->receive_queue, options->receive_buffer, device.max_qp_wr);
    end->sends = fitted(options->send_queue, options->send_buffer, device.max_qp_wr);
    size_t most = (size_t)128 << port.active_mtu;
    end->longest = (most < RS_MOST_DATAGRAM ? most : RS_MOST_DATAGRAM) - end->header_length;
    if (!(end->pd = ibv_alloc_pd(context)) || !(end->comp_channel = ibv_create_comp_channel(context)) ||
        !(end->cq = ibv_create_cq(context, (int)(end->receives + end->sends), NULL, end->comp_channel, 0)))
        return -1;
    fcntl(end->comp_channel->fd, F_SETFL, O_NONBLOCK);
    struct ibv_qp_init_attr attributes = {
        .send_cq = end->cq, .recv_cq = end->cq, .qp_type = IBV_QPT_UD, .sq_sig_all = 1,
        .cap = {.max_send_wr = end->sends, .max_recv_wr = end->receives, .max_send_sge = 1, .max_recv_sge = 1}};
    return rdma_create_qp(end->id, end->pd, &attributes);
}

static int open_slots(struct rs_end *end) {
    size_t size = (size_t)(end->receives + end->sends) * RS_SLOT;
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return -1;
    end->memory = memory;
    end->free_slots = calloc(end->sends, sizeof *end->free_slots);
    end->mr = ibv_reg_mr(end->pd, memory, size, IBV_ACCESS_LOCAL_WRITE);
    if (!end->free_slots || !end->mr)
        return -1;
    for (uint32_t slot = 0; slot < end->sends; slot++)
        end->free_slots[end->free_count++] = end->receives + slot;
    for (uint32_t slot = 0; slot < end->receives; slot++)
        rs_end_post_receive(end, slot);
    return 0;
}

struct rs_end *rs_end_open(struct rs_socket *rs, const struct sockaddr_storage *address) {
    struct rs_end *end = calloc(1, sizeof *end);
    if (!end) {
        errno = ENOMEM;
        return NULL;
    }
    struct rs_peer_key own = rs_key_of(address);
    uint32_t flow = own.version == 6 ? ntohl(((const struct sockaddr_in6 *)address)->sin6_flowinfo) : 0;
    int on = 1;
    end->address = *address;
    end->header_length = rs_pack_source(end->header, &own, flow);
    if (!rdma_create_id(rs->channel, &end->id, NULL, RDMA_PS_UDP) &&
        (!rs->options.reuse_address ||
         !rdma_set_option(end->id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof on)) &&
        !rdma_bind_addr(end->id, (struct sockaddr *)&end->address) && !open_queue_pair(end, &rs->options) &&
        !open_slots(end) && !verbs_req_notify_cq(end->cq, 0))
        return end;
    rs_end_close(end);
    return NULL;
}

/* -- sending --------------------------------------------------------------------------------------------------------- */

int rs_end_send(struct rs_end *end, struct ibv_ah *ah, uint32_t qpn, const struct iovec *vectors, size_t count) {
    if (!end->free_count)
        return EAGAIN;
    uint32_t slot = end->free_slots[--end->free_count];
    uint8_t *start = end->memory + (size_t)slot * RS_SLOT, *to = start + end->header_length;
    memcpy(start, end->header, end->header_length);
    for (size_t i = 0; i < count; i++) {
        memcpy(to, vectors[i].iov_base, vectors[i].iov_len);
        to += vectors[i].iov_len;
    }
    struct ibv_sge piece = {.addr = (uintptr_t)start, .length = (uint32_t)(to - start), .lkey = end->mr->lkey};
    struct ibv_send_wr request = {.wr_id = slot | RS_IS_SEND, .sg_list = &piece, .num_sge = 1, .opcode = IBV_WR_SEND,
                                  .send_flags = IBV_SEND_SIGNALED}, *bad;
    request.wr.ud.ah = ah;
    request.wr.ud.remote_qpn = qpn;
    request.wr.ud.remote_qkey = RS_QKEY;
    int code = verbs_post_send(end->id->qp, &request, &bad);
    if (code)
        end->free_slots[end->free_count++] = slot;
    return code;
}
