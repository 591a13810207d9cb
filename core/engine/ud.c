/* Datagrams sent and received, exactly as the Python engine does it (proto/roce/ud.py). */
#include "rdmacm_ud.h"

#include <string.h>

enum {
    HEADERS_LENGTH = RDMACM_BTH_LENGTH + RDMACM_DETH_LENGTH,
    SHORTEST = HEADERS_LENGTH + RDMACM_ICRC_LENGTH,
    IPV4_LENGTH = 20,
    UDP_LENGTH = 8,
    UDP_PROTOCOL = 17,
};

/* -- states ---------------------------------------------------------------------------------------------------------- */

void rdmacm_ud_init(struct rdmacm_ud *ud, uint32_t qp_num) {
    *ud = (struct rdmacm_ud){.transport = RDMACM_UD, .qp_num = qp_num, .max_payload = RDMACM_UD_MOST_PAYLOAD};
}

bool rdmacm_ud_post_send(struct rdmacm_ud *ud, const struct rdmacm_send *send) {
    return send->memory.length <= RDMACM_UD_MOST_PAYLOAD && rdmacm_post_send(&ud->queues, send);
}

void rdmacm_ud_flush(struct rdmacm_ud *ud) {
    ud->failed = true;
    rdmacm_flush_sends(&ud->queues, RDMACM_WC_WR_FLUSH_ERR);
    rdmacm_flush_recvs(&ud->queues);
}

/* -- sending --------------------------------------------------------------------------------------------------------- */

void *rdmacm_ud_next_route(struct rdmacm_ud *ud) {
    if (!ud->sends_count || ud->paused)
        return NULL;
    const struct rdmacm_send *send = RDMACM_RING_AT(ud, sends, 0);
    if (!send->memory.is_inaccessible)
        return send->route;
    ud->send_failed = true;
    rdmacm_flush_sends(&ud->queues, RDMACM_WC_LOC_PROT_ERR);
    return NULL;
}

static void add_packet(struct rdmacm_ud *ud, struct rdmacm_out *out, const struct rdmacm_send *send) {
    uint8_t *headers = rdmacm_out_headers(out);
    size_t length = HEADERS_LENGTH;
    bool has_imm = send->opcode == RDMACM_WR_SEND_WITH_IMM;
    headers[0] = has_imm ? RDMACM_UD_SEND_ONLY_WITH_IMMEDIATE : RDMACM_UD_SEND_ONLY;
    headers[1] = (uint8_t)(((0 - send->memory.length) & 3) << 4 | (send->solicited ? 0x80u : 0u));
    headers[2] = RDMACM_DEFAULT_PKEY >> 8;
    headers[3] = RDMACM_DEFAULT_PKEY & 0xFF;
    rdmacm_store32(headers + 4, send->dest_qpn);
    rdmacm_store32(headers + 8, ud->psn);
    rdmacm_store32(headers + 12, send->qkey & RDMACM_OWN_QKEY ? ud->qkey : send->qkey);
    rdmacm_store32(headers + 16, ud->qp_num);
    if (has_imm) {
        rdmacm_store32(headers + length, send->word);
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
        const struct rdmacm_send *send = RDMACM_RING_AT(ud, sends, 0);
        add_packet(ud, out, send);
        rdmacm_end_send(&ud->queues, (uint32_t)send->memory.length);
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
        memcpy(grh + 8, from->source, sizeof from->source);
        memcpy(grh + 24, from->destination, sizeof from->destination);
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

static size_t headers_length(uint8_t opcode) {
    return opcode == RDMACM_UD_SEND_ONLY_WITH_IMMEDIATE ? HEADERS_LENGTH + RDMACM_IMM_DT_LENGTH : HEADERS_LENGTH;
}

/* Of a packet that has as many bytes as its headers, padding and ICRC. */
static size_t payload_of(const uint8_t *data, size_t size) {
    return size - headers_length(data[0]) - (data[1] >> 4 & 3) - RDMACM_ICRC_LENGTH;
}

static enum rdmacm_refusal check_headers(const struct rdmacm_ud *ud, const uint8_t *data, size_t size) {
    if (size < SHORTEST)
        return RDMACM_REFUSED_LENGTH;
    if (data[0] != RDMACM_UD_SEND_ONLY && data[0] != RDMACM_UD_SEND_ONLY_WITH_IMMEDIATE)
        return RDMACM_REFUSED_OPCODE;
    if (size < headers_length(data[0]) + (data[1] >> 4 & 3) + RDMACM_ICRC_LENGTH || size & 3)
        return RDMACM_REFUSED_LENGTH;
    if (data[1] & 0xF)
        return RDMACM_REFUSED_VERSION;
    if (ud->failed)
        return RDMACM_REFUSED_STATE;
    if ((((uint32_t)data[2] << 8 | data[3]) & RDMACM_PKEY_BITS) != RDMACM_PKEY_BITS)
        return RDMACM_REFUSED_PKEY;
    if (rdmacm_load32(data + 12) != ud->qkey)
        return RDMACM_REFUSED_QKEY;
    size_t payload = payload_of(data, size);
    return payload > ud->max_payload || payload > RDMACM_UD_MOST_PAYLOAD ? RDMACM_REFUSED_LENGTH
                                                                         : RDMACM_NOT_REFUSED;
}

enum rdmacm_refusal rdmacm_ud_refuses(const struct rdmacm_ud *ud, const struct rdmacm_flow *flow, const uint8_t *data,
                                      size_t size) {
    enum rdmacm_refusal reason = check_headers(ud, data, size);
    if (reason == RDMACM_NOT_REFUSED && rdmacm_flow_identify(flow, data, size, 0) < 0)
        return RDMACM_REFUSED_ICRC;
    return reason;
}

/* Take the receive for a message of `length` bytes with its GRH; one that is too short stays. */
static enum rdmacm_refusal take_recv(struct rdmacm_ud *ud, size_t length, struct rdmacm_recv *recv) {
    const struct rdmacm_recv *first = ud->srq          ? rdmacm_srq_first(ud->srq)
                                      : ud->recvs_count ? RDMACM_RING_AT(ud, recvs, 0)
                                                        : NULL;
    if (!first)
        return RDMACM_REFUSED_NO_RECEIVE;
    if (first->memory.length < length && !first->memory.is_inaccessible)
        return RDMACM_REFUSED_SHORT_RECEIVE;
    return rdmacm_take_recv(&ud->queues, recv) ? RDMACM_NOT_REFUSED : RDMACM_REFUSED_NO_RECEIVE;
}

bool rdmacm_ud_write(const struct rdmacm_memory *memory, const uint8_t *grh, const uint8_t *data, size_t size) {
    rdmacm_scatter(memory, 0, grh, RDMACM_GRH_LENGTH);
    rdmacm_scatter(memory, RDMACM_GRH_LENGTH, data, size);
    return true;
}

/* `place`: that of the packet in its train, which probably is its IPv4 identification. */
static enum rdmacm_refusal take_packet(struct rdmacm_ud *ud, const uint8_t *data, size_t size, size_t place,
                                       const struct rdmacm_ud_source *from) {
    enum rdmacm_refusal reason = check_headers(ud, data, size);
    if (reason != RDMACM_NOT_REFUSED)
        return reason;
    int32_t identification = rdmacm_flow_identify(&from->flow, data, size, (uint16_t)place);
    if (identification < 0)
        return RDMACM_REFUSED_ICRC;
    size_t start = headers_length(data[0]), payload = payload_of(data, size);
    struct rdmacm_recv recv;
    reason = take_recv(ud, RDMACM_GRH_LENGTH + payload, &recv);
    if (reason != RDMACM_NOT_REFUSED)
        return reason;
    uint8_t grh[RDMACM_GRH_LENGTH];
    put_grh(grh, from, size, (uint16_t)identification);
    rdmacm_write *write = from->write ? from->write : rdmacm_ud_write;
    if (recv.memory.is_inaccessible || !write(&recv.memory, grh, data + start, payload)) {
        rdmacm_flush_recv(&ud->queues, recv.pin, RDMACM_WC_LOC_PROT_ERR);
        rdmacm_ud_flush(ud);
        return RDMACM_NOT_REFUSED;
    }
    bool has_imm = data[0] == RDMACM_UD_SEND_ONLY_WITH_IMMEDIATE;
    struct rdmacm_completion *completion =
        rdmacm_complete(&ud->queues, recv.pin, (uint32_t)(RDMACM_GRH_LENGTH + payload));
    completion->is_recv = completion->is_datagram = true;
    completion->is_ipv6 = from->flow.is_ipv6;
    completion->solicited = data[1] >> 7;
    completion->opcode = RDMACM_WR_SEND;
    completion->word_kind = has_imm ? RDMACM_IMMEDIATE : RDMACM_NO_WORD;
    completion->word = has_imm ? rdmacm_load32(data + HEADERS_LENGTH) : 0;
    completion->src_qp = rdmacm_load32(data + 16) & RDMACM_QPN_MASK;
    return RDMACM_NOT_REFUSED;
}

size_t rdmacm_ud_take(struct rdmacm_ud *ud, const uint8_t *data, size_t size, size_t segment,
                      const struct rdmacm_ud_source *from) {
    size_t accepted = 0, at = 0, place = 0, step = segment ? segment : size;
    do {
        size_t length = size - at < step ? size - at : step;
        enum rdmacm_refusal reason = take_packet(ud, data + at, length, place++, from);
        if (reason == RDMACM_NOT_REFUSED)
            accepted++;
        else
            rdmacm_count_refused(&ud->queues, reason);
        at += length;
    } while (at < size);
    return accepted;
}
