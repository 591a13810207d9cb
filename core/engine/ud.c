/* Datagrams sent and received, exactly as the Python engine does it (proto/roce/ud.py). Every check comes before the
 * first change: a packet is processed as a whole or not at all.
 */
#include "rdmacm_ud.h"

#include <stdlib.h>
#include <string.h>

enum {
    HEADERS_LENGTH = RDMACM_BTH_LENGTH + RDMACM_DETH_LENGTH,
    SHORTEST = HEADERS_LENGTH + RDMACM_ICRC_LENGTH,
    LONGEST = HEADERS_LENGTH + RDMACM_IMM_DT_LENGTH + RDMACM_UD_MOST_PAYLOAD + RDMACM_ICRC_LENGTH,
    IPV4_LENGTH = 20,
    UDP_LENGTH = 8,
    UDP_PROTOCOL = 17,
};

/* -- queues ---------------------------------------------------------------------------------------------------------- */

void rdmacm_ud_free(struct rdmacm_ud *ud) {
    free(ud->sends), free(ud->recvs);
    ud->sends = NULL, ud->recvs = NULL;
    ud->sends_capacity = ud->recvs_capacity = ud->sends_count = ud->recvs_count = 0;
    rdmacm_completions_free(&ud->completions);
}

static bool reserve_completion(struct rdmacm_ud *ud) {
    return rdmacm_reserve_completions(&ud->completions, ud->sends_count + ud->recvs_count);
}

bool rdmacm_ud_post_send(struct rdmacm_ud *ud, const struct rdmacm_ud_send *send) {
    if (!ud->core_sends || ud->failed || ud->send_failed || send->memory.length > ud->max_payload ||
        send->memory.length > RDMACM_UD_MOST_PAYLOAD || !RDMACM_RING_RESERVE(ud, sends) || !reserve_completion(ud))
        return false;
    *RDMACM_RING_AT(ud, sends, ud->sends_count++) = *send;
    return true;
}

bool rdmacm_ud_post_recv(struct rdmacm_ud *ud, const struct rdmacm_recv *recv) {
    if (!ud->core_receives || ud->failed || !RDMACM_RING_RESERVE(ud, recvs) || !reserve_completion(ud))
        return false;
    *RDMACM_RING_AT(ud, recvs, ud->recvs_count++) = *recv;
    return true;
}

struct rdmacm_ud_send rdmacm_ud_pop_send(struct rdmacm_ud *ud) {
    struct rdmacm_ud_send send = ud->sends[ud->sends_head];
    RDMACM_RING_DROP(ud, sends);
    return send;
}

struct rdmacm_recv rdmacm_ud_pop_recv(struct rdmacm_ud *ud) {
    struct rdmacm_recv recv = ud->recvs[ud->recvs_head];
    RDMACM_RING_DROP(ud, recvs);
    return recv;
}

/* -- sending --------------------------------------------------------------------------------------------------------- */

void *rdmacm_ud_next_route(struct rdmacm_ud *ud) {
    return ud->sends_count && !ud->is_paused ? RDMACM_RING_AT(ud, sends, 0)->route : NULL;
}

static void add_packet(struct rdmacm_ud *ud, struct rdmacm_out *out, const struct rdmacm_ud_send *send) {
    uint8_t *headers = rdmacm_out_headers(out);
    size_t length = HEADERS_LENGTH;
    headers[0] = send->has_imm ? RDMACM_UD_SEND_ONLY_WITH_IMMEDIATE : RDMACM_UD_SEND_ONLY;
    headers[1] = (uint8_t)(((0 - send->memory.length) & 3) << 4 | (send->solicited ? 0x80u : 0u));
    headers[2] = RDMACM_DEFAULT_PKEY >> 8;
    headers[3] = RDMACM_DEFAULT_PKEY & 0xFF;
    rdmacm_store32(headers + 4, send->dest_qpn);
    rdmacm_store32(headers + 8, ud->psn);
    rdmacm_store32(headers + 12, send->qkey & RDMACM_OWN_QKEY ? ud->qkey : send->qkey);
    rdmacm_store32(headers + 16, ud->qp_num);
    if (send->has_imm) {
        rdmacm_store32(headers + length, send->imm);
        length += RDMACM_IMM_DT_LENGTH;
    }
    rdmacm_out_add(out, length, send->memory.elements, 0, send->memory.length);
    ud->psn = rdmacm_psn_add(ud->psn, 1);
}

size_t rdmacm_ud_build(struct rdmacm_ud *ud, struct rdmacm_out *out, size_t limit, size_t train) {
    void *route = rdmacm_ud_next_route(ud);
    size_t count = 0;
    if (limit > RDMACM_BUILD_LIMIT)
        limit = RDMACM_BUILD_LIMIT;
    rdmacm_out_begin(out, &ud->flow_out, train);
    if (route)
        ud->flow_out = RDMACM_RING_AT(ud, sends, 0)->flow;
    for (; route && count < limit && rdmacm_ud_next_route(ud) == route && rdmacm_out_has_room(out); count++) {
        struct rdmacm_ud_send send = rdmacm_ud_pop_send(ud);
        add_packet(ud, out, &send);
        struct rdmacm_completion *completion = rdmacm_complete(&ud->completions, send.pin, (uint32_t)send.memory.length);
        completion->opcode = RDMACM_WR_SEND;
        completion->unsignaled = send.unsignaled;
    }
    rdmacm_out_finish(out);
    return count;
}

/* -- receiving ------------------------------------------------------------------------------------------------------- */

static void store16(uint8_t *p, size_t value) {
    p[0] = (uint8_t)(value >> 8);
    p[1] = (uint8_t)value;
}

/* The IP header of a packet that has `size` bytes from BTH to ICRC (class GRH of the Python engine). */
static void put_grh(uint8_t *grh, const struct rdmacm_ud_source *from, size_t size, uint16_t identification) {
    memset(grh, 0, RDMACM_GRH_LENGTH);
    if (from->flow.is_ipv6) {
        rdmacm_store32(grh, 6u << 28 | (uint32_t)from->traffic_class << 20);
        store16(grh + 4, UDP_LENGTH + size);
        grh[6] = UDP_PROTOCOL;
        grh[7] = from->hop_limit;
        memcpy(grh + 8, from->source, 16);
        memcpy(grh + 24, from->destination, 16);
        return;
    }
    uint8_t *ip = grh + RDMACM_GRH_LENGTH - IPV4_LENGTH;
    ip[0] = 0x45;
    ip[1] = from->traffic_class;
    store16(ip + 2, IPV4_LENGTH + UDP_LENGTH + size);
    store16(ip + 4, identification);
    ip[6] = 0x40; /* don't fragment */
    ip[8] = from->hop_limit;
    ip[9] = UDP_PROTOCOL;
    memcpy(ip + 12, from->source, 4);
    memcpy(ip + 16, from->destination, 4);
    uint32_t sum = 0;
    for (size_t at = 0; at < IPV4_LENGTH; at += 2)
        sum += (uint32_t)ip[at] << 8 | ip[at + 1];
    sum = (sum & 0xFFFF) + (sum >> 16);
    store16(ip + 10, ~(sum + (sum >> 16)) & 0xFFFF);
}

enum outcome { ACCEPTED, NO_RECEIVE, UNKNOWN };

/* `place`: that of the packet in its train, which probably is its IPv4 identification. */
static enum outcome take_packet(struct rdmacm_ud *ud, const uint8_t *data, size_t size, size_t place,
                                const struct rdmacm_ud_source *from) {
    if (size < SHORTEST || size > LONGEST || size & 3)
        return UNKNOWN;
    bool has_imm = data[0] == RDMACM_UD_SEND_ONLY_WITH_IMMEDIATE;
    if (!has_imm && data[0] != RDMACM_UD_SEND_ONLY)
        return UNKNOWN;
    size_t start = has_imm ? HEADERS_LENGTH + RDMACM_IMM_DT_LENGTH : HEADERS_LENGTH, pad = data[1] >> 4 & 3;
    if (size < start + pad + RDMACM_ICRC_LENGTH)
        return UNKNOWN;
    size_t payload = size - start - pad - RDMACM_ICRC_LENGTH;
    uint32_t pkey = (uint32_t)data[2] << 8 | data[3];
    /* A packet with FECN, BECN or a bit after them has another ICRC: byte 4 counts as ones in it. */
    if (payload > ud->max_payload || data[1] & 0xF || (pkey & RDMACM_PKEY_BITS) != RDMACM_PKEY_BITS ||
        rdmacm_load32(data + 4) != ud->qp_num || rdmacm_load32(data + 12) != ud->qkey)
        return UNKNOWN;
    uint16_t guess = (uint16_t)place;
    uint32_t crc = rdmacm_crc32(rdmacm_flow_start(&from->flow, size, guess), data, size);
    int32_t identification = rdmacm_flow_solve(&from->flow, crc, size, guess);
    if (identification < 0)
        return UNKNOWN;
    if (!ud->recvs_count)
        return NO_RECEIVE;
    const struct rdmacm_recv *recv = RDMACM_RING_AT(ud, recvs, 0);
    if (recv->memory.length < RDMACM_GRH_LENGTH + payload)
        return UNKNOWN;
    uint8_t grh[RDMACM_GRH_LENGTH];
    put_grh(grh, from, size, (uint16_t)identification);
    rdmacm_scatter(&recv->memory, 0, grh, sizeof grh);
    rdmacm_scatter(&recv->memory, RDMACM_GRH_LENGTH, data + start, payload);
    struct rdmacm_completion *completion =
        rdmacm_complete(&ud->completions, recv->pin, (uint32_t)(RDMACM_GRH_LENGTH + payload));
    completion->is_recv = completion->is_datagram = true;
    completion->solicited = data[1] >> 7;
    completion->opcode = RDMACM_WR_SEND;
    completion->word_kind = has_imm ? RDMACM_IMMEDIATE : RDMACM_NO_WORD;
    completion->word = has_imm ? rdmacm_load32(data + HEADERS_LENGTH) : 0;
    completion->src_qp = rdmacm_load32(data + 16) & RDMACM_QPN_MASK;
    rdmacm_ud_pop_recv(ud);
    return ACCEPTED;
}

size_t rdmacm_ud_take(struct rdmacm_ud *ud, const uint8_t *data, size_t size, size_t segment,
                      const struct rdmacm_ud_source *from, size_t *accepted, size_t *no_receive) {
    size_t at = 0, step = segment ? segment : size;
    *accepted = *no_receive = 0;
    for (size_t place = 0; ud->core_receives && !ud->failed && at < size; place++) {
        size_t length = size - at < step ? size - at : step;
        enum outcome outcome = take_packet(ud, data + at, length, place, from);
        if (outcome == UNKNOWN)
            return at;
        if (outcome == ACCEPTED)
            ++*accepted;
        else
            ++*no_receive;
        at += length;
    }
    return at;
}

enum rdmacm_refusal rdmacm_ud_refuses(struct rdmacm_ud *ud, const struct rdmacm_flow *flow, const uint8_t *data,
                                      size_t size) {
    if (size < SHORTEST)
        return RDMACM_REFUSED_LENGTH;
    if (data[0] != RDMACM_UD_SEND_ONLY && data[0] != RDMACM_UD_SEND_ONLY_WITH_IMMEDIATE)
        return RDMACM_REFUSED_OPCODE;
    size_t start = data[0] == RDMACM_UD_SEND_ONLY ? HEADERS_LENGTH : HEADERS_LENGTH + RDMACM_IMM_DT_LENGTH;
    size_t pad = data[1] >> 4 & 3;
    if (size < start + pad + RDMACM_ICRC_LENGTH || size & 3)
        return RDMACM_REFUSED_LENGTH;
    size_t payload = size - start - pad - RDMACM_ICRC_LENGTH;
    if (data[1] & 0xF)
        return RDMACM_REFUSED_VERSION;
    if ((((uint32_t)data[2] << 8 | data[3]) & RDMACM_PKEY_BITS) != RDMACM_PKEY_BITS)
        return RDMACM_REFUSED_PKEY;
    if (rdmacm_load32(data + 12) != ud->qkey)
        return RDMACM_REFUSED_QKEY;
    if (payload > ud->max_payload)
        return RDMACM_REFUSED_LENGTH;
    if (rdmacm_flow_identify(flow, data, size, 0) < 0)
        return RDMACM_REFUSED_ICRC;
    bool is_short = ud->core_receives && ud->recvs_count &&
                    RDMACM_RING_AT(ud, recvs, 0)->memory.length < RDMACM_GRH_LENGTH + payload;
    return is_short ? RDMACM_REFUSED_SHORT_RECEIVE : RDMACM_NOT_REFUSED;
}
