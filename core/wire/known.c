/* The queue pairs that a wire knows, and the packets that none of them accepts: these are dropped and counted here.
 *
 * Python counts the same by the same names (docs/core.md). A packet that passes every check is a queue pair's.
 */
#include "rdmacm_wire.h"

#include <stdlib.h>
#include <string.h>

/* Datagrams for other processes that may wait for the owner. */
enum { MOST_OF_OTHERS = 64 };

/* -- queue pairs --------------------------------------------------------------------------------------------------- */

struct rdmacm_known *rdmacm_wire_find(const struct rdmacm_wire *wire, uint32_t qp_num) {
    return rdmacm_table_find(&wire->known, qp_num);
}

struct rdmacm_known *rdmacm_wire_know(struct rdmacm_wire *wire, uint32_t qp_num) {
    struct rdmacm_known *known = rdmacm_wire_find(wire, qp_num);
    if (known)
        return known;
    known = calloc(1, sizeof *known);
    if (!known || !rdmacm_table_add(&wire->known, qp_num, known)) {
        free(known);
        return NULL;
    }
    known->qp_num = qp_num;
    return known;
}

void rdmacm_wire_forget(struct rdmacm_wire *wire, uint32_t qp_num) {
    struct rdmacm_known *known = rdmacm_table_remove(&wire->known, qp_num);
    if (!known)
        return;
    if (known->conn)
        rdmacm_wire_detach(known->conn);
    RDMACM_UNLIST(wire->refusing, known, next, is_listed);
    free(known);
}

void rdmacm_wire_forget_all(struct rdmacm_wire *wire) {
    for (size_t i = 0; i < wire->known.capacity;) {
        if (wire->known.slots[i].item)
            rdmacm_wire_forget(wire, wire->known.slots[i].key); /* another may move there */
        else
            i++;
    }
}

/* -- the checks ------------------------------------------------------------------------------------------------------ */

const uint8_t *rdmacm_source_of(const struct rdmacm_received *from) {
    if (from->local_length == 4 && from->source.ss_family == AF_INET)
        return (const uint8_t *)&((const struct sockaddr_in *)&from->source)->sin_addr;
    if (from->local_length == 16 && from->source.ss_family == AF_INET6)
        return (const uint8_t *)&((const struct sockaddr_in6 *)&from->source)->sin6_addr;
    return NULL;
}

bool rdmacm_is_between(const struct rdmacm_received *from, size_t length, const uint8_t *remote, const uint8_t *local) {
    const uint8_t *source = rdmacm_source_of(from);
    return source && from->local_length == length && !memcmp(from->local, local, length) &&
           !memcmp(source, remote, length);
}

/* The same of the peer of a queue pair, whatever its UDP port. */
static bool is_of_peer(const struct rdmacm_known *known, const struct rdmacm_received *from) {
    return rdmacm_is_between(from, known->is_ipv6 ? 16 : 4, known->remote, known->local) &&
           (!known->is_ipv6 || !known->scope ||
            ((const struct sockaddr_in6 *)&from->source)->sin6_scope_id == known->scope);
}

bool rdmacm_flow_of(const struct rdmacm_received *from, struct rdmacm_flow *flow) {
    const uint8_t *source = rdmacm_source_of(from);
    if (!source)
        return false;
    uint16_t port = ((const struct sockaddr_in *)&from->source)->sin_port; /* of IPv6 in the same place */
    rdmacm_flow_init(flow, source, from->local, from->local_length, ntohs(port), RDMACM_ROCE_PORT);
    return true;
}

static void refuse(struct rdmacm_wire *wire, struct rdmacm_known *known, enum rdmacm_refusal reason,
                   uint64_t count) {
    if (known->refused_at) {
        known->refused_at[reason] += count;
        return;
    }
    known->refused[reason] += count;
    if (!known->is_listed) {
        known->is_listed = true;
        known->next = wire->refusing;
        wire->refusing = known;
    }
}

void rdmacm_wire_count_refused(struct rdmacm_conn *conn, uint32_t *refused) {
    for (enum rdmacm_refusal reason = 0; reason < RDMACM_REFUSALS; reason++) {
        if (refused[reason])
            refuse(conn->wire, conn->known, reason, refused[reason]);
        refused[reason] = 0;
    }
}

static bool is_own_slot(const struct rdmacm_wire *wire, uint32_t slot) {
    return wire->own_slots[slot >> 3] >> (slot & 7) & 1;
}

/* A packet whose queue pair does not exist here. */
static enum rdmacm_stray judge_unknown(const struct rdmacm_wire *wire, uint32_t qp_num, bool is_in_train) {
    uint32_t slot = qp_num >> RDMACM_QPN_BITS;
    if (qp_num == RDMACM_GSI_QPN)
        return RDMACM_NO_STRAY;
    if (!wire->shares_port)
        return qp_num == RDMACM_MULTICAST_QPN ? RDMACM_NO_STRAY : RDMACM_UNKNOWN_QP;
    if (qp_num == RDMACM_MULTICAST_QPN || !slot)
        return RDMACM_STRAY;
    if (is_own_slot(wire, slot))
        return RDMACM_UNKNOWN_QP;
    /* The system gives a packet of another process to this one only in a train. */
    return is_in_train ? RDMACM_NO_STRAY : RDMACM_STRAY;
}

/* The same of one that does. */
static enum rdmacm_stray judge_known(const struct rdmacm_known *known, const struct rdmacm_received *from) {
    const struct rdmacm_ud_end *end = known->conn ? known->conn->ud : NULL;
    if (known->accepts == RDMACM_ACCEPTS_NONE)
        return RDMACM_WRONG_STATE;
    if (known->accepts == RDMACM_ACCEPTS_PEER && !is_of_peer(known, from))
        return RDMACM_WRONG_ADDRESS;
    if (end && !rdmacm_ud_is_own(end, from))
        return RDMACM_WRONG_ADDRESS;
    return end && end->ud->failed ? RDMACM_WRONG_STATE : RDMACM_NO_STRAY;
}

/* Why a queue pair refuses a packet that has reached it. */
static enum rdmacm_refusal refusal(struct rdmacm_known *known, const struct rdmacm_received *from,
                                   const uint8_t *data, size_t size) {
    const struct rdmacm_conn *conn = known->conn;
    struct rdmacm_flow flow;
    if (!rdmacm_flow_of(from, &flow))
        return RDMACM_NOT_REFUSED;
    if (conn && conn->rc)
        return rdmacm_rc_refuses(conn->rc, &flow, data, size);
    if (conn && conn->ud)
        return rdmacm_ud_refuses(conn->ud->ud, &flow, data, size);
    return rdmacm_flow_identify(&flow, data, size, 0) < 0 ? RDMACM_REFUSED_ICRC : RDMACM_NOT_REFUSED;
}

bool rdmacm_wire_is_full(const struct rdmacm_wire *wire, const struct rdmacm_known *known) {
    size_t most = known == &wire->others && wire->shares_port ? MOST_OF_OTHERS : RDMACM_QUEUE_DATAGRAMS;
    return known->queued >= most || known->queued_bytes >= RDMACM_QUEUE_BYTES ||
           wire->arrivals_count >= RDMACM_ALL_DATAGRAMS || wire->arrivals_bytes >= RDMACM_ALL_BYTES;
}

enum rdmacm_verdict rdmacm_wire_judge(struct rdmacm_wire *wire, const struct rdmacm_received *from, size_t at,
                                      size_t size, uint32_t qp_num, bool is_first) {
    struct rdmacm_known *known = rdmacm_wire_find(wire, qp_num);
    enum rdmacm_stray stray =
        known ? judge_known(known, from) : judge_unknown(wire, qp_num, from->segment);
    if (stray != RDMACM_NO_STRAY) {
        wire->tally->strays[stray] += is_first;
        return RDMACM_NOBODYS;
    }
    if (known && rdmacm_wire_is_full(wire, known)) { /* it takes no check to drop it */
        wire->tally->strays[RDMACM_BACKLOG]++;
        return RDMACM_NOBODYS;
    }
    enum rdmacm_refusal reason = known ? refusal(known, from, wire->buffer + at, size) : RDMACM_NOT_REFUSED;
    if (reason == RDMACM_NOT_REFUSED)
        return RDMACM_KEPT;
    refuse(wire, known, reason, 1);
    return RDMACM_REFUSED;
}
