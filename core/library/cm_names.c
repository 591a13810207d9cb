/* librdmacm: names of events, ports, devices. */
#include "cm.h"

#include <endian.h>
#include <stdlib.h>

/* -- events -------------------------------------------------------------------------------------------------------- */

static const char *const names[] = {
    [RDMA_CM_EVENT_ADDR_RESOLVED] = "RDMA_CM_EVENT_ADDR_RESOLVED",
    [RDMA_CM_EVENT_ADDR_ERROR] = "RDMA_CM_EVENT_ADDR_ERROR",
    [RDMA_CM_EVENT_ROUTE_RESOLVED] = "RDMA_CM_EVENT_ROUTE_RESOLVED",
    [RDMA_CM_EVENT_ROUTE_ERROR] = "RDMA_CM_EVENT_ROUTE_ERROR",
    [RDMA_CM_EVENT_CONNECT_REQUEST] = "RDMA_CM_EVENT_CONNECT_REQUEST",
    [RDMA_CM_EVENT_CONNECT_RESPONSE] = "RDMA_CM_EVENT_CONNECT_RESPONSE",
    [RDMA_CM_EVENT_CONNECT_ERROR] = "RDMA_CM_EVENT_CONNECT_ERROR",
    [RDMA_CM_EVENT_UNREACHABLE] = "RDMA_CM_EVENT_UNREACHABLE",
    [RDMA_CM_EVENT_REJECTED] = "RDMA_CM_EVENT_REJECTED",
    [RDMA_CM_EVENT_ESTABLISHED] = "RDMA_CM_EVENT_ESTABLISHED",
    [RDMA_CM_EVENT_DISCONNECTED] = "RDMA_CM_EVENT_DISCONNECTED",
    [RDMA_CM_EVENT_DEVICE_REMOVAL] = "RDMA_CM_EVENT_DEVICE_REMOVAL",
    [RDMA_CM_EVENT_MULTICAST_JOIN] = "RDMA_CM_EVENT_MULTICAST_JOIN",
    [RDMA_CM_EVENT_MULTICAST_ERROR] = "RDMA_CM_EVENT_MULTICAST_ERROR",
    [RDMA_CM_EVENT_ADDR_CHANGE] = "RDMA_CM_EVENT_ADDR_CHANGE",
    [RDMA_CM_EVENT_TIMEWAIT_EXIT] = "RDMA_CM_EVENT_TIMEWAIT_EXIT",
};

EXPORT const char *rdma_event_str(enum rdma_cm_event_type event) {
    return event < sizeof names / sizeof *names ? names[event] : "UNKNOWN EVENT";
}

/* -- ports --------------------------------------------------------------------------------------------------------- */

/* In network byte order; 0 for other families. */
static __be16 port_of(const struct sockaddr_storage *address) {
    switch (address->ss_family) {
    case AF_INET: return ((const struct sockaddr_in *)address)->sin_port;
    case AF_INET6: return ((const struct sockaddr_in6 *)address)->sin6_port;
    case CM_AF_IB: return htobe16((uint16_t)be64toh(((const struct sockaddr_ib *)address)->sib_sid));
    default: return 0;
    }
}

EXPORT __be16 rdma_get_src_port(struct rdma_cm_id *id) { return port_of(&id->route.addr.src_storage); }
EXPORT __be16 rdma_get_dst_port(struct rdma_cm_id *id) { return port_of(&id->route.addr.dst_storage); }

/* -- devices ------------------------------------------------------------------------------------------------------- */

EXPORT struct ibv_context **rdma_get_devices(int *count) {
    int found;
    struct ibv_context **list = library_contexts(&found);
    if (count)
        *count = list ? found : 0;
    return list;
}

EXPORT void rdma_free_devices(struct ibv_context **list) { free(list); }
