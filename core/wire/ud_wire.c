/* Datagram queue pairs of a wire. */
#include "rdmacm_wire.h"

#include <string.h>

/* The fields of the IP header where the system does not say them. */
enum { USUAL_TRAFFIC_CLASS = 0, USUAL_HOP_LIMIT = 64 };

bool rdmacm_ud_is_own(const struct rdmacm_ud_end *end, const struct rdmacm_received *from) {
    const struct rdmacm_addresses *addresses = end->addresses;
    bool is_ipv6 = from->local_length == 16;
    if (!rdmacm_source_of(from))
        return false;
    if (is_ipv6 && rdmacm_is_link_local(from->local)) {
        uint32_t scope = ((const struct sockaddr_in6 *)&from->source)->sin6_scope_id;
        if (scope && scope != addresses->ifindex)
            return false;
    }
    for (size_t i = 0; i < addresses->count; i++)
        if (addresses->items[i].is_ipv6 == is_ipv6 &&
            !memcmp(addresses->items[i].address, from->local, from->local_length))
            return true;
    return false;
}

size_t rdmacm_ud_deliver(struct rdmacm_ud_end *end, const struct rdmacm_received *from, size_t at, size_t size) {
    struct rdmacm_wire *wire = end->conn.wire;
    struct rdmacm_ud_source source = {.traffic_class = USUAL_TRAFFIC_CLASS, .hop_limit = USUAL_HOP_LIMIT};
    if (wire->polled != end->conn.recv_cq)
        source.write = wire->write;
    if (!rdmacm_flow_of(from, &source.flow))
        return 0;
    memcpy(source.source, rdmacm_source_of(from), from->local_length);
    memcpy(source.destination, from->local, from->local_length);
    if (from->traffic_class >= 0 && from->hop_limit >= 0) {
        source.traffic_class = (uint8_t)from->traffic_class;
        source.hop_limit = (uint8_t)from->hop_limit;
    }
    size_t accepted = rdmacm_ud_take(end->ud, wire->buffer + at, size, from->segment, &source);
    rdmacm_wire_see_engine(&end->conn);
    return accepted;
}

size_t rdmacm_ud_transmit(struct rdmacm_ud_end *end, size_t limit) {
    struct rdmacm_wire *wire = end->conn.wire;
    struct rdmacm_out *out = &wire->out;
    struct rdmacm_ud *ud = end->ud;
    size_t sent = 0;
    while (sent < limit) {
        struct rdmacm_route *route = rdmacm_ud_next_route(ud);
        if (!route)
            break;
        sent += rdmacm_ud_build(ud, out, limit - sent, route->train);
        for (size_t i = 0; i < out->datagrams_count; i++)
            rdmacm_wire_send(wire, end->fds[route->is_ipv6], route, &out->datagrams[i]);
    }
    rdmacm_wire_see_engine(&end->conn);
    return sent;
}
