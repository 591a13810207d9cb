/* librdmacm: endpoints, and requests of synchronous listeners. */
#include "cm.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* -- endpoints ----------------------------------------------------------------------------------------------------- */

/* Keep what rdma_get_request(3) makes queue pairs with. */
static int prepare_passive(struct cm_id *id, const struct rdma_addrinfo *info, struct ibv_pd *pd,
                           const struct ibv_qp_init_attr *attributes) {
    if (rdma_bind_addr(&id->id, info->ai_src_addr))
        return -1;
    if (pd)
        id->id.pd = pd;
    id->pd = pd;
    if (!attributes)
        return 0;
    id->attributes = malloc(sizeof *id->attributes);
    if (!id->attributes)
        return fail(ENOMEM);
    *id->attributes = *attributes;
    id->attributes->qp_type = (enum ibv_qp_type)info->ai_qp_type;
    return 0;
}

/* Take the path that the address information has, or ask for one. */
static int resolve_route(struct cm_id *id, const struct rdma_addrinfo *info) {
    if (!info->ai_route_len)
        return rdma_resolve_route(&id->id, CM_ROUTE_TIMEOUT);
    if (rdma_set_option(&id->id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, info->ai_route, info->ai_route_len))
        return -1;
    return cm_complete(id);
}

static int keep_connect_data(struct cm_id *id, const struct rdma_addrinfo *info) {
    if (!info->ai_connect_len)
        return 0;
    id->connect_data = malloc(info->ai_connect_len);
    if (!id->connect_data)
        return fail(ENOMEM);
    memcpy(id->connect_data, info->ai_connect, info->ai_connect_len);
    id->connect_length = info->ai_connect_len;
    return 0;
}

static int prepare_active(struct cm_id *id, const struct rdma_addrinfo *info, struct ibv_pd *pd,
                          struct ibv_qp_init_attr *attributes) {
    struct sockaddr *source = info->ai_src_len ? info->ai_src_addr : NULL;
    if (rdma_resolve_addr(&id->id, source, info->ai_dst_addr, CM_ROUTE_TIMEOUT) || resolve_route(id, info))
        return -1;
    if (attributes) {
        attributes->qp_type = (enum ibv_qp_type)info->ai_qp_type;
        if (rdma_create_qp(&id->id, pd, attributes))
            return -1;
    }
    return keep_connect_data(id, info);
}

EXPORT void rdma_destroy_ep(struct rdma_cm_id *id) {
    if (id->qp)
        rdma_destroy_qp(id);
    if (id->srq)
        rdma_destroy_srq(id);
    rdma_destroy_id(id);
}

EXPORT int rdma_create_ep(struct rdma_cm_id **result, struct rdma_addrinfo *info, struct ibv_pd *pd,
                          struct ibv_qp_init_attr *attributes) {
    struct cm_id *id = cm_create((enum rdma_port_space)info->ai_port_space, (enum ibv_qp_type)info->ai_qp_type);
    if (!id)
        return -1;
    bool is_passive = info->ai_flags & CM_RAI_PASSIVE;
    if (is_passive ? prepare_passive(id, info, pd, attributes) : prepare_active(id, info, pd, attributes)) {
        int code = errno;
        rdma_destroy_ep(&id->id);
        return fail(code);
    }
    *result = &id->id;
    return 0;
}

/* -- requests ------------------------------------------------------------------------------------------------------ */

/* The queue pair that the listener has attributes for. */
static int create_queue_pair(const struct cm_id *listener, struct rdma_cm_id *id) {
    if (!listener->attributes)
        return 0;
    struct ibv_qp_init_attr attributes = *listener->attributes;
    return rdma_create_qp(id, listener->pd, &attributes);
}

EXPORT int rdma_get_request(struct rdma_cm_id *listen, struct rdma_cm_id **id) {
    struct cm_id *listener = cm_id_of(listen);
    if (!listener->is_synchronous)
        return fail(EINVAL);
    if (cm_complete(listener))
        return -1;
    struct rdma_cm_event *event = listen->event;
    if (event->event != RDMA_CM_EVENT_CONNECT_REQUEST)
        return fail(EINVAL);
    listen->event = NULL;
    if (create_queue_pair(listener, event->id)) {
        int code = errno;
        struct rdma_cm_id *refused = event->id;
        rdma_ack_cm_event(event);
        rdma_destroy_id(refused);
        return fail(code);
    }
    *id = event->id;
    event->id->event = event;
    return 0;
}
