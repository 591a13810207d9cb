/* Packets received: how the peer's requests are executed and answered, and how its answers are processed.
 *
 * The Python engines have the same rules at length (responder.py, responses.py; uc.py, xrc.py). Checks are made in the order of InfiniBand
 * Architecture 9.7.4 and of rxe: opcode sequence, permission, resources, lengths, then the memory key; only then is memory
 * touched.
 */
#include "rdmacm_core.h"

#include <string.h>

/* The parts of a packet. `body` follows the BTH and the XRCETH, without padding and ICRC. */
struct packet {
    uint8_t opcode; /* without the transport service */
    struct rdmacm_packet_type type;
    bool solicited, ack_requested;
    uint32_t psn;
    uint32_t srqn; /* of a request of XRC: the shared receive queue that it is for */
    const uint8_t *body;
    size_t size; /* of the body */
};

/* What was done with a packet. */
enum outcome {
    TAKEN,
    DROPPED, /* it was counted, and perhaps answered */
};

static enum outcome dropped(struct rdmacm_rc *rc, enum rdmacm_count reason) {
    rdmacm_count(rc, reason);
    return DROPPED;
}

static enum outcome refused(struct rdmacm_rc *rc, enum rdmacm_refusal reason) {
    rdmacm_count_refused(&rc->queues, reason);
    return DROPPED;
}

/* -- requests of the peer -------------------------------------------------------------------------------------------- */

/* Drop a message of an unreliable connection: nobody is told, and its receive is the next one. Only a receive whose memory
 * cannot be written ends the connection. */
static enum outcome drop_message(struct rdmacm_rc *rc, uint32_t syndrome, uint8_t status) {
    rc->operation = 0;
    if ((syndrome & RDMACM_SYNDROME_KIND) == RDMACM_RNR_NAK)
        return refused(rc, RDMACM_REFUSED_NO_RECEIVE);
    if (status == RDMACM_WC_LOC_LEN_ERR)
        return refused(rc, RDMACM_REFUSED_SHORT_RECEIVE);
    if (status != RDMACM_WC_LOC_QP_OP_ERR)
        return dropped(rc, RDMACM_DROPPED_REFUSED);
    rdmacm_fail_receive(rc, status);
    return TAKEN;
}

/* Answer a request that cannot be executed with a NAK. Unless it only has to come again, the connection ends, and the
 * receive in progress completes with `status`. */
static enum outcome refuse(struct rdmacm_rc *rc, const struct packet *packet, uint32_t syndrome, uint8_t status) {
    if (rc->transport == RDMACM_UC)
        return drop_message(rc, syndrome, status);
    rdmacm_respond(rc, packet->psn, syndrome);
    rc->nak_sent = true; /* what follows is dropped without another one */
    if ((syndrome & RDMACM_SYNDROME_KIND) == RDMACM_RNR_NAK)
        return dropped(rc, RDMACM_DROPPED_NOT_READY);
    rdmacm_count(rc, RDMACM_DROPPED_REFUSED);
    rdmacm_fail_receive(rc, status);
    return DROPPED;
}

static enum outcome refuse_invalid(struct rdmacm_rc *rc, const struct packet *packet) {
    return refuse(rc, packet, RDMACM_NAK_INVALID_REQUEST, RDMACM_WC_REM_INV_REQ_ERR);
}

static enum outcome refuse_access(struct rdmacm_rc *rc, const struct packet *packet) {
    return refuse(rc, packet, RDMACM_NAK_REMOTE_ACCESS_ERROR, RDMACM_WC_REM_ACCESS_ERR);
}

static enum outcome refuse_not_ready(struct rdmacm_rc *rc, const struct packet *packet) {
    return refuse(rc, packet, RDMACM_RNR_NAK | (rc->min_rnr_timer & 0x1F), RDMACM_WC_SUCCESS);
}

/* First and middle packets have one MTU of payload, last packets at least a byte, only packets any number. */
static bool has_right_size(const struct rdmacm_rc *rc, const struct packet *packet, size_t size) {
    if (!(packet->type.parts & RDMACM_ENDS))
        return size == rc->path_mtu;
    return size <= rc->path_mtu && (packet->type.parts & RDMACM_STARTS || size);
}

/* A packet of a message was executed. */
static enum outcome executed(struct rdmacm_rc *rc, const struct packet *packet) {
    rc->expected_psn = rdmacm_psn_add(packet->psn, 1);
    rc->operation = packet->type.operation;
    if (packet->type.parts & RDMACM_ENDS) {
        rc->operation = 0;
        rc->msn = rdmacm_psn_add(rc->msn, 1);
        rc->executed_psn = rc->expected_psn;
    }
    if (packet->ack_requested && rc->transport != RDMACM_UC)
        rdmacm_respond(rc, packet->psn, RDMACM_ACK_SYNDROME);
    return TAKEN;
}

/* Have the receive for a message: that of an abandoned one, or the next. False: there is none. */
static bool have_recv(struct rdmacm_rc *rc) {
    return rc->current_recv.pin || rdmacm_take_recv(&rc->queues, &rc->current_recv);
}

static void complete_recv(struct rdmacm_rc *rc, const struct packet *packet, uint64_t length, uint8_t opcode,
                          uint32_t word) {
    struct rdmacm_completion *completion = rdmacm_complete(&rc->queues, rc->current_recv.pin, (uint32_t)length);
    rc->current_recv = (struct rdmacm_recv){0};
    completion->is_recv = true;
    completion->solicited = packet->solicited;
    completion->opcode = opcode;
    completion->word_kind = packet->type.word;
    completion->word = word;
    completion->srqn = (uint32_t)rc->srqn;
}

static enum outcome take_send(struct rdmacm_rc *rc, const struct packet *packet) {
    const uint8_t *data = packet->body;
    size_t size = packet->size;
    uint32_t word = 0;
    if (packet->type.word) {
        word = rdmacm_load32(data);
        data += 4, size -= 4;
    }
    if (!has_right_size(rc, packet, size))
        return refuse_invalid(rc, packet);
    bool invalidates = packet->type.word == RDMACM_INVALIDATED;
    if (packet->type.parts & RDMACM_STARTS) {
        if (!have_recv(rc))
            return refuse_not_ready(rc, packet);
        rc->message_offset = 0;
    }
    const struct rdmacm_recv *recv = &rc->current_recv;
    if (recv->memory.is_inaccessible)
        return refuse(rc, packet, RDMACM_NAK_REMOTE_OPERATIONAL_ERROR, RDMACM_WC_LOC_QP_OP_ERR);
    uint64_t offset = rc->message_offset, end = offset + size;
    rc->message_offset = end;
    if (end > recv->memory.length || end > RDMACM_LONGEST_MESSAGE)
        return refuse(rc, packet, RDMACM_NAK_INVALID_REQUEST, RDMACM_WC_LOC_LEN_ERR);
    if (invalidates && !rdmacm_window_invalidate(rc->regions, rc->pd, rc->qp, word))
        return refuse(rc, packet, RDMACM_NAK_REMOTE_ACCESS_ERROR, RDMACM_WC_REM_INV_REQ_ERR);
    rdmacm_scatter(&recv->memory, offset, data, size);
    if (packet->type.parts & RDMACM_ENDS)
        complete_recv(rc, packet, end, RDMACM_WR_SEND, word);
    return executed(rc, packet);
}

static enum outcome take_write(struct rdmacm_rc *rc, const struct packet *packet) {
    const uint8_t *data = packet->body;
    size_t size = packet->size;
    uint64_t address = rc->write_address, offset = rc->message_offset;
    uint32_t rkey = rc->write_rkey, length = rc->write_length, word = 0;
    if (packet->type.parts & RDMACM_STARTS) {
        address = rdmacm_load64(data);
        rkey = rdmacm_load32(data + 8);
        length = rdmacm_load32(data + 12);
        offset = 0;
        data += RDMACM_RETH_LENGTH, size -= RDMACM_RETH_LENGTH;
        if (length > RDMACM_LONGEST_MESSAGE)
            return refuse_invalid(rc, packet);
    }
    /* The permission of a reliable connection is that of the first packet. */
    if ((packet->type.parts & RDMACM_STARTS || rc->transport == RDMACM_UC) && !(rc->access & RDMACM_ACCESS_REMOTE_WRITE))
        return refuse_invalid(rc, packet);
    if (packet->type.word) {
        word = rdmacm_load32(data);
        data += 4, size -= 4;
    }
    if (!has_right_size(rc, packet, size))
        return refuse_invalid(rc, packet);
    uint8_t *target = NULL;
    if (length) { /* the memory may have been deregistered since the last packet */
        target = rdmacm_rc_memory(rc, rkey, address, length, RDMACM_ACCESS_REMOTE_WRITE);
        if (!target)
            return refuse_access(rc, packet);
    }
    uint64_t end = offset + size;
    if (packet->type.parts & RDMACM_ENDS ? end != length : end >= length)
        return refuse_invalid(rc, packet);
    if (packet->type.word) { /* immediate data takes a receive */
        if (!have_recv(rc))
            return refuse_not_ready(rc, packet);
        complete_recv(rc, packet, length, RDMACM_WR_WRITE_WITH_IMM, word);
    }
    if (size)
        memcpy(target + offset, data, size);
    rc->write_rkey = rkey, rc->write_address = address, rc->write_length = length;
    rc->message_offset = end;
    return executed(rc, packet);
}

/* -- requests with a resource ---------------------------------------------------------------------------------------- */

/* Answer a request that was executed, and takes `packets` PSNs. Its resource is kept, but that of a FLUSH: all that its
 * answer needs is its PSN, and rxe's requester does not limit their number. */
static enum outcome answer(struct rdmacm_rc *rc, const struct packet *packet, struct rdmacm_resource resource,
                           uint32_t packets) {
    resource.operation = packet->type.operation;
    resource.pd = rc->pd;
    resource.first_psn = packet->psn;
    resource.last_psn = rdmacm_psn_add(packet->psn, packets - 1);
    struct rdmacm_response *response = rdmacm_add_response(rc);
    if (!response) /* as if it had been lost: the peer sends it again */
        return dropped(rc, RDMACM_DROPPED_SEQUENCE);
    rc->expected_psn = rc->executed_psn = rdmacm_psn_add(resource.last_psn, 1);
    rc->msn = rdmacm_psn_add(rc->msn, 1);
    response->of = resource;
    response->psn = resource.first_psn, response->last_psn = resource.last_psn;
    response->msn = rc->msn;
    if (resource.operation == RDMACM_OPERATION_FLUSH) {
        rc->waiting_flushes++;
        return TAKEN;
    }
    rc->unanswered++;
    rc->resources[rc->resources_next] = resource;
    rc->resources_next = (rc->resources_next + 1) % rc->resources_capacity;
    if (rc->resources_count < rc->resources_capacity)
        rc->resources_count++;
    return TAKEN;
}

/* Whether the peer has as many requests without an answer as it may. */
static bool has_most_unanswered(const struct rdmacm_rc *rc) {
    return rc->unanswered >= rc->max_dest_rd_atomic || rc->unanswered >= rc->resources_capacity;
}

static enum outcome take_read(struct rdmacm_rc *rc, const struct packet *packet) {
    uint64_t address = rdmacm_load64(packet->body);
    uint32_t rkey = rdmacm_load32(packet->body + 8), length = rdmacm_load32(packet->body + 12);
    if (!(rc->access & RDMACM_ACCESS_REMOTE_READ) || length > RDMACM_LONGEST_MESSAGE || has_most_unanswered(rc))
        return refuse_invalid(rc, packet);
    if (length && !rdmacm_rc_memory(rc, rkey, address, length, RDMACM_ACCESS_REMOTE_READ))
        return refuse_access(rc, packet);
    return answer(rc, packet, (struct rdmacm_resource){.address = address, .rkey = rkey, .length = length},
                  rdmacm_packets(rc, length));
}

static uint64_t load_native(const uint8_t *memory) {
    uint64_t value;
    memcpy(&value, memory, sizeof value);
    return value;
}

/* One store of a 64-bit word, which no other reader of the memory sees in part where its address allows that. */
static void store_native(uint8_t *memory, uint64_t value) {
    if ((uintptr_t)memory % sizeof value == 0)
        __atomic_store_n((uint64_t *)(void *)memory, value, __ATOMIC_RELAXED);
    else
        memcpy(memory, &value, sizeof value);
}

static enum outcome take_atomic(struct rdmacm_rc *rc, const struct packet *packet) {
    uint64_t address = rdmacm_load64(packet->body);
    uint32_t rkey = rdmacm_load32(packet->body + 8);
    uint64_t first = rdmacm_load64(packet->body + 12), second = rdmacm_load64(packet->body + 20);
    if (!(rc->access & RDMACM_ACCESS_REMOTE_ATOMIC) || address % 8 || has_most_unanswered(rc))
        return refuse_invalid(rc, packet);
    uint8_t *target = rdmacm_rc_memory(rc, rkey, address, 8, RDMACM_ACCESS_REMOTE_ATOMIC);
    if (!target)
        return refuse_access(rc, packet);
    uint64_t original = load_native(target);
    enum outcome outcome = answer(
        rc, packet, (struct rdmacm_resource){.address = address, .rkey = rkey, .length = 8, .original = original}, 1);
    if (outcome != TAKEN)
        return outcome;
    if (packet->opcode == RDMACM_FETCH_ADD)
        store_native(target, original + first);
    else if (original == second)
        store_native(target, first);
    return TAKEN;
}

/* The checks are those of rxe and in its order. */
static enum outcome take_atomic_write(struct rdmacm_rc *rc, const struct packet *packet) {
    uint64_t address = rdmacm_load64(packet->body);
    uint32_t rkey = rdmacm_load32(packet->body + 8), length = rdmacm_load32(packet->body + 12);
    size_t size = packet->size - RDMACM_RETH_LENGTH;
    if (!(rc->access & RDMACM_ACCESS_REMOTE_WRITE) || has_most_unanswered(rc) || size > rc->path_mtu ||
        length > RDMACM_LONGEST_MESSAGE)
        return refuse_invalid(rc, packet);
    uint8_t *target = rdmacm_rc_memory(rc, rkey, address, length, RDMACM_ACCESS_REMOTE_WRITE);
    if (!target)
        return refuse_access(rc, packet);
    if (length != 8 || size != 8 || address % 8)
        return refuse_invalid(rc, packet);
    enum outcome outcome = answer(rc, packet, (struct rdmacm_resource){.address = address, .rkey = rkey}, 1);
    if (outcome == TAKEN)
        store_native(target, load_native(packet->body + RDMACM_RETH_LENGTH));
    return outcome;
}

/* Nothing is left to do for a FLUSH once its permissions are checked: every write before it was made in the memory itself.
 * Unlike a READ or WRITE, one of 0 bytes has to have a valid key, as in rxe. */
static enum outcome take_flush(struct rdmacm_rc *rc, const struct packet *packet) {
    uint32_t word = rdmacm_load32(packet->body), placement = word & 0xF, level = word >> 4 & 3;
    const uint8_t *reth = packet->body + RDMACM_FETH_LENGTH;
    uint64_t address = rdmacm_load64(reth);
    uint32_t rkey = rdmacm_load32(reth + 8), length = rdmacm_load32(reth + 12);
    uint32_t access = (placement & RDMACM_PLACEMENT_GLOBAL ? RDMACM_ACCESS_FLUSH_GLOBAL : 0) |
                      (placement & RDMACM_PLACEMENT_PERSISTENT ? RDMACM_ACCESS_FLUSH_PERSISTENT : 0);
    bool is_known = !(placement & ~(uint32_t)(RDMACM_PLACEMENT_GLOBAL | RDMACM_PLACEMENT_PERSISTENT)) && placement &&
                    level <= RDMACM_LEVEL_MR;
    if (rdmacm_has_most_flushes(rc)) /* as if it had been lost: the peer sends it again */
        return dropped(rc, RDMACM_DROPPED_SEQUENCE);
    if (rc->operation || !is_known || access & ~rc->access || length > RDMACM_LONGEST_MESSAGE)
        return refuse_invalid(rc, packet);
    bool may = level == RDMACM_LEVEL_MR
                   ? rdmacm_regions_permit(rc->regions, rc->pd, rkey, access)
                   : rdmacm_rc_memory(rc, rkey, address, length, access) != NULL;
    if (!may)
        return refuse_access(rc, packet);
    return answer(rc, packet, (struct rdmacm_resource){.address = address, .rkey = rkey}, 1);
}

/* -- requests that come again, or too early -------------------------------------------------------------------------- */

/* The kept resource that has a PSN, or NULL. */
static const struct rdmacm_resource *find_resource(const struct rdmacm_rc *rc, uint32_t psn) {
    for (size_t i = 0; i < rc->resources_count; i++) {
        const struct rdmacm_resource *kept = &rc->resources[i];
        if (rdmacm_psn_after(psn, kept->first_psn) <= rdmacm_psn_after(kept->last_psn, kept->first_psn))
            return kept;
    }
    return NULL;
}

/* The repeated response of a resource that still has to be sent: the peer has no use for what is left of it. Else a new
 * one; NULL if there may be no other. */
static struct rdmacm_response *repeated_response(struct rdmacm_rc *rc, uint32_t first_psn) {
    for (size_t i = 0; i < rc->responses_count; i++) {
        struct rdmacm_response *other = RDMACM_RING_AT(rc, responses, i);
        if (other->is_repeated && other->of.operation != RDMACM_OPERATION_FLUSH && other->of.first_psn == first_psn)
            return other;
    }
    struct rdmacm_response *response = rdmacm_add_response(rc);
    if (response)
        response->is_repeated = true;
    return response;
}

/* Answer a READ, atomic or ATOMIC WRITE from its resource; a READ may ask for a part of its response. Address and key of
 * an ATOMIC WRITE are not compared: rxe repeats it with the address 0. */
static enum outcome respond_again(struct rdmacm_rc *rc, const struct packet *packet) {
    const struct rdmacm_resource *kept = find_resource(rc, packet->psn);
    if (!kept || kept->operation != packet->type.operation)
        return dropped(rc, RDMACM_DROPPED_DUPLICATES);
    struct rdmacm_resource again = *kept;
    uint32_t packets = 1;
    if (packet->opcode == RDMACM_READ_REQUEST) {
        again.address = rdmacm_load64(packet->body);
        again.length = rdmacm_load32(packet->body + 12);
        packets = rdmacm_packets(rc, again.length);
        if (rdmacm_load32(packet->body + 8) != kept->rkey || again.address < kept->address ||
            again.length > kept->length || again.address - kept->address > kept->length - again.length ||
            packets > rdmacm_psn_after(kept->last_psn, packet->psn) + 1)
            return dropped(rc, RDMACM_DROPPED_DUPLICATES);
    }
    struct rdmacm_response *response = repeated_response(rc, kept->first_psn);
    if (response) {
        response->of = again;
        response->psn = packet->psn;
        response->last_psn = rdmacm_psn_add(packet->psn, packets - 1);
        response->offset = 0;
    }
    return dropped(rc, RDMACM_DROPPED_DUPLICATES);
}

static void flush_again(struct rdmacm_rc *rc, const struct packet *packet) {
    struct rdmacm_response *response = rdmacm_has_most_flushes(rc) ? NULL : rdmacm_add_response(rc);
    if (!response)
        return;
    rc->waiting_flushes++;
    response->is_repeated = true;
    response->of.operation = RDMACM_OPERATION_FLUSH;
    response->psn = response->last_psn = response->of.first_psn = response->of.last_psn = packet->psn;
}

/* Answer a SEND or WRITE, unless a NAK is still to be sent: that acknowledges as much. */
static void acknowledge_again(struct rdmacm_rc *rc) {
    uint32_t syndrome = RDMACM_ACK_SYNDROME; /* of the answer that leaves last */
    if (rc->responses_count)
        syndrome = RDMACM_RING_AT(rc, responses, rc->responses_count - 1)->syndrome;
    else if (rc->ack_psn >= 0)
        syndrome = rc->ack_aeth >> 24;
    if (syndrome == RDMACM_ACK_SYNDROME)
        rdmacm_respond(rc, rdmacm_psn_add(rc->executed_psn, RDMACM_PSN_MASK), RDMACM_ACK_SYNDROME);
}

/* A request that is not the next one: the one before it was lost, or it was executed before. */
static enum outcome take_out_of_order(struct rdmacm_rc *rc, const struct packet *packet) {
    if (rdmacm_psn_is_after(packet->psn, rc->expected_psn)) {
        if (!rc->nak_sent) {
            rc->nak_sent = true;
            rdmacm_count(rc, RDMACM_EARLY_REQUESTS);
            rdmacm_respond(rc, rc->expected_psn, RDMACM_NAK_PSN_SEQUENCE_ERROR);
        }
        return dropped(rc, RDMACM_DROPPED_SEQUENCE);
    }
    switch (packet->type.operation) {
    case RDMACM_OPERATION_SEND:
    case RDMACM_OPERATION_WRITE: acknowledge_again(rc); break;
    case RDMACM_OPERATION_FLUSH: flush_again(rc, packet); break;
    default: return respond_again(rc, packet);
    }
    return dropped(rc, RDMACM_DROPPED_DUPLICATES);
}

static enum outcome execute(struct rdmacm_rc *rc, const struct packet *packet) {
    bool starts = packet->type.parts & RDMACM_STARTS;
    if (packet->type.operation != RDMACM_OPERATION_FLUSH && rc->operation != (starts ? 0 : packet->type.operation))
        return refuse_invalid(rc, packet);
    switch (packet->type.operation) {
    case RDMACM_OPERATION_SEND: return take_send(rc, packet);
    case RDMACM_OPERATION_WRITE: return take_write(rc, packet);
    case RDMACM_OPERATION_READ: return take_read(rc, packet);
    case RDMACM_OPERATION_ATOMIC: return take_atomic(rc, packet);
    case RDMACM_OPERATION_ATOMIC_WRITE: return take_atomic_write(rc, packet);
    default: return take_flush(rc, packet);
    }
}

/* What the responder of an unreliable connection does, by the operation of the message in progress and by what the packet
 * is; rdmacm.proto.roce.uc_states has the reasons. A rest that does not have the next PSN comes after a gap. */
enum step { BEGIN, CONTINUE, RESTART, ABANDON, DROP };
enum arrival { SEND_START, WRITE_START, SEND_REST, WRITE_REST, GAP, ARRIVALS };
static const uint8_t steps[][ARRIVALS] = {
    [0] = {BEGIN, BEGIN, DROP, DROP, DROP},
    [RDMACM_OPERATION_SEND] = {RESTART, RESTART, CONTINUE, ABANDON, ABANDON},
    [RDMACM_OPERATION_WRITE] = {RESTART, RESTART, ABANDON, CONTINUE, ABANDON},
};

static enum outcome take_unacknowledged(struct rdmacm_rc *rc, const struct packet *packet) {
    bool is_write = packet->type.operation == RDMACM_OPERATION_WRITE;
    enum arrival arrival = is_write ? WRITE_REST : SEND_REST;
    if (packet->type.parts & RDMACM_STARTS)
        arrival = is_write ? WRITE_START : SEND_START;
    else if (packet->psn != rc->expected_psn)
        arrival = GAP;
    enum step step = steps[rc->operation][arrival];
    if (step != CONTINUE)
        rc->operation = 0;
    if (step == ABANDON || step == DROP)
        return dropped(rc, RDMACM_DROPPED_SEQUENCE);
    return execute(rc, packet);
}

/* Use the receives and the memory of the shared receive queue that a request names. False where it may not name it: all
 * packets of a message name the same one. */
static bool select_queue(struct rdmacm_rc *rc, const struct packet *packet) {
    if (rc->operation && (int32_t)packet->srqn != rc->srqn)
        return false;
    struct rdmacm_srq *found = rdmacm_table_find(rc->domain, packet->srqn);
    if (!found)
        return false;
    rc->srqn = (int32_t)packet->srqn;
    rc->srq = found;
    rc->pd = found->pd;
    return true;
}

static enum outcome take_request(struct rdmacm_rc *rc, const struct packet *packet) {
    if (rc->transport == RDMACM_UC)
        return take_unacknowledged(rc, packet);
    if (packet->psn != rc->expected_psn)
        return take_out_of_order(rc, packet);
    rc->nak_sent = false;
    if (rc->domain && !select_queue(rc, packet))
        return refuse_invalid(rc, packet);
    return execute(rc, packet);
}

/* -- answers of the peer --------------------------------------------------------------------------------------------- */

/* The peer has acknowledged something new: all retries are available again, and the timer restarts. */
static void progressed(struct rdmacm_rc *rc, double now) {
    rc->retransmitting = false;
    rc->retries_left = rc->retry_cnt;
    rc->rnr_retries_left = rc->rnr_retry;
    rdmacm_start_timer(rc, now);
}

/* The first packet that is missing of the response to a request. */
static uint32_t missing_psn(const struct rdmacm_rc *rc, const struct rdmacm_send *send) {
    return rdmacm_psn_add(send->first_psn, send->received_bytes / rc->path_mtu);
}

/* Request what is missing of the response to the oldest request. */
static void request_again(struct rdmacm_rc *rc, double now) {
    uint32_t psn = missing_psn(rc, RDMACM_RING_AT(rc, sends, 0));
    if (rdmacm_psn_is_after(rc->next_psn, psn)) {
        rdmacm_count(rc, RDMACM_IMPLIED_NAKS);
        rdmacm_retransmit(rc, psn, now);
    }
}

/* Complete the requests up to `psn` that an ACK completes, as far as no READ or atomic is before them. */
static void acknowledge_up_to(struct rdmacm_rc *rc, uint32_t psn, double now) {
    bool progress = false;
    while (rc->outstanding_count) {
        const struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, 0);
        bool is_later = (psn - send->last_psn) & RDMACM_PSN_HALF; /* whether it ends after psn */
        uint8_t flags = rdmacm_request_types[send->opcode].flags;
        if (!(flags & RDMACM_IS_ACKNOWLEDGED)) {
            rc->stray_answers++; /* the peer is there, though its response does not arrive */
            /* The ACK is for a later request, so the response to this one was lost. Every ACK shows that until the request
             * is sent again; then next_psn is after its first PSN. */
            if (!is_later && psn != send->last_psn && rdmacm_psn_is_after(rc->next_psn, send->first_psn))
                request_again(rc, now);
            break;
        }
        if (is_later) {
            if (!((psn - rc->unacked_psn) & RDMACM_PSN_HALF)) {
                rdmacm_acknowledged(rc, psn);
                progress = true;
            }
            break;
        }
        if (flags & RDMACM_HAS_EMPTY_RESPONSE && send->requested_packets)
            rc->outstanding_reads--;
        rdmacm_complete_send(rc, send->length);
        progress = true;
    }
    if (progress)
        progressed(rc, now);
}

/* Seconds that the codes 0 to 31 of an RNR NAK stand for. */
static const double rnr_seconds[32] = RDMACM_RNR_SECONDS;

/* The peer has had no receive for the request of a PSN: send it again after a pause. */
static void wait_for_receive(struct rdmacm_rc *rc, uint32_t psn, uint32_t timer_code, double now) {
    rdmacm_count(rc, RDMACM_RNR_NAKS);
    if (rc->rnr_waiting)
        return;
    if (rc->rnr_retries_left <= 0) {
        rdmacm_count(rc, RDMACM_RNR_RETRIES_EXCEEDED);
        rdmacm_rc_fail(rc, RDMACM_WC_RNR_RETRY_EXC_ERR);
        return;
    }
    if (rc->rnr_retry < 7) /* 7 is for ever */
        rc->rnr_retries_left--;
    rc->next_psn = psn;
    rc->send_index = 0;
    rc->rnr_waiting = true;
    rc->has_deadline = true;
    rc->deadline = now + rnr_seconds[timer_code];
}

/* The status of the oldest request for a NAK that ends the connection; RDMACM_WC_SUCCESS: there is none. */
static uint8_t status_of_nak(uint32_t syndrome) {
    switch (syndrome) {
    case RDMACM_NAK_INVALID_REQUEST: return RDMACM_WC_REM_INV_REQ_ERR;
    case RDMACM_NAK_REMOTE_ACCESS_ERROR: return RDMACM_WC_REM_ACCESS_ERR;
    case RDMACM_NAK_REMOTE_OPERATIONAL_ERROR: return RDMACM_WC_REM_OP_ERR;
    default: return RDMACM_WC_SUCCESS;
    }
}

static enum outcome take_ack(struct rdmacm_rc *rc, const struct packet *packet, double now) {
    uint32_t psn = packet->psn, syndrome = packet->body[0], kind = syndrome & RDMACM_SYNDROME_KIND;
    if (!kind) {
        acknowledge_up_to(rc, psn, now);
        return TAKEN;
    }
    bool is_lost = syndrome == RDMACM_NAK_PSN_SEQUENCE_ERROR;
    uint8_t status = status_of_nak(syndrome);
    if (kind != RDMACM_RNR_NAK && !is_lost && !status) /* reserved */
        return dropped(rc, RDMACM_DROPPED_ANSWERS);
    acknowledge_up_to(rc, rdmacm_psn_add(psn, RDMACM_PSN_MASK), now);
    if (rc->failed || !rc->outstanding_count)
        return TAKEN;
    if (kind == RDMACM_RNR_NAK) {
        wait_for_receive(rc, psn, syndrome & 0x1F, now);
    } else if (is_lost) {
        rdmacm_count(rc, RDMACM_SEQUENCE_NAKS);
        rdmacm_retransmit(rc, psn, now);
    } else {
        rdmacm_rc_fail(rc, status);
    }
    return TAKEN;
}

/* The index of the outstanding request that has a PSN; `outstanding_count` if none has. */
static size_t find_request(struct rdmacm_rc *rc, uint32_t psn) {
    size_t index = 0;
    for (; index < rc->outstanding_count; index++) {
        const struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, index);
        if (rdmacm_psn_after(psn, send->first_psn) <= rdmacm_psn_after(send->last_psn, send->first_psn))
            break;
    }
    return index;
}

/* Let a response to a request acknowledge those before it. Whether it is the oldest then: a READ or atomic before it may
 * have no response. */
static bool becomes_oldest(struct rdmacm_rc *rc, size_t index, uint32_t first_psn, double now) {
    if (index)
        acknowledge_up_to(rc, rdmacm_psn_add(first_psn, RDMACM_PSN_MASK), now);
    return rc->outstanding_count && RDMACM_RING_AT(rc, sends, 0)->first_psn == first_psn;
}

/* A packet of the response to the oldest request, a READ. */
static enum outcome take_read_response(struct rdmacm_rc *rc, const struct packet *packet, double now) {
    struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, 0);
    uint32_t psn = packet->psn, mtu = rc->path_mtu, index = send->received_bytes / mtu, wanted = missing_psn(rc, send);
    if (psn != wanted || index >= send->requested_packets) {
        if (rdmacm_psn_is_after(psn, wanted))
            request_again(rc, now);
        return dropped(rc, RDMACM_DROPPED_SEQUENCE);
    }
    size_t header = packet->opcode == RDMACM_READ_RESPONSE_MIDDLE ? 0 : RDMACM_AETH_LENGTH, size = packet->size - header;
    bool is_last = psn == send->last_psn, ends_part = is_last || index + 1 == rdmacm_read_part_end(rc, index);
    uint32_t left = send->length - send->received_bytes;
    if (size != (left < mtu ? left : mtu) || ends_part != !!(packet->type.parts & RDMACM_ENDS)) {
        rdmacm_rc_fail(rc, RDMACM_WC_BAD_RESP_ERR);
        return TAKEN;
    }
    if (send->memory.is_inaccessible) { /* since it began */
        rdmacm_rc_fail(rc, RDMACM_WC_LOC_PROT_ERR);
        return TAKEN;
    }
    rdmacm_scatter(&send->memory, send->received_bytes, packet->body + header, size);
    send->received_bytes += (uint32_t)size;
    rc->outstanding_reads -= ends_part;
    if (is_last)
        rdmacm_complete_send(rc, send->length);
    else
        rdmacm_acknowledged(rc, psn);
    progressed(rc, now);
    return TAKEN;
}

/* The response to the oldest request, an atomic. */
static enum outcome take_atomic_response(struct rdmacm_rc *rc, const struct packet *packet, double now) {
    const struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, 0);
    uint64_t original = rdmacm_load64(packet->body + RDMACM_AETH_LENGTH);
    uint8_t bytes[sizeof original];
    if (send->memory.is_inaccessible) { /* since it began */
        rdmacm_rc_fail(rc, RDMACM_WC_LOC_PROT_ERR);
        return TAKEN;
    }
    memcpy(bytes, &original, sizeof bytes);
    rdmacm_scatter(&send->memory, 0, bytes, send->length < sizeof bytes ? send->length : sizeof bytes);
    rc->outstanding_reads--;
    rdmacm_complete_send(rc, sizeof bytes);
    progressed(rc, now);
    return TAKEN;
}

/* The response to a FLUSH or ATOMIC WRITE. */
static enum outcome take_empty_response(struct rdmacm_rc *rc, const struct packet *packet, size_t index, double now) {
    const struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, index);
    if (packet->opcode == RDMACM_READ_RESPONSE_ONLY && packet->size == RDMACM_AETH_LENGTH &&
        !(packet->body[0] & RDMACM_SYNDROME_KIND)) {
        if (send->opcode == RDMACM_WR_FLUSH && send->requested_packets)
            rc->flush_icrc_twice = send->had_icrc_twice;
        acknowledge_up_to(rc, send->last_psn, now);
    } else if (becomes_oldest(rc, index, send->first_psn, now)) {
        rdmacm_rc_fail(rc, RDMACM_WC_BAD_RESP_ERR);
    }
    return TAKEN;
}

static enum outcome take_response(struct rdmacm_rc *rc, const struct packet *packet, double now) {
    uint32_t outstanding = rdmacm_psn_after(rc->end_psn, rc->unacked_psn);
    bool is_outstanding = rc->outstanding_count && rdmacm_psn_after(packet->psn, rc->unacked_psn) < outstanding;
    if (is_outstanding && packet->opcode == RDMACM_ACKNOWLEDGE)
        return take_ack(rc, packet, now);
    size_t index = is_outstanding ? find_request(rc, packet->psn) : rc->outstanding_count;
    if (index < rc->outstanding_count) {
        const struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, index);
        uint8_t flags = rdmacm_request_types[send->opcode].flags;
        bool is_atomic = packet->opcode == RDMACM_ATOMIC_ACKNOWLEDGE;
        if (is_atomic && flags & RDMACM_IS_ATOMIC)
            return becomes_oldest(rc, index, send->first_psn, now) ? take_atomic_response(rc, packet, now) : TAKEN;
        if (!is_atomic && flags & RDMACM_IS_READ)
            return becomes_oldest(rc, index, send->first_psn, now) ? take_read_response(rc, packet, now) : TAKEN;
        if (!is_atomic && flags & RDMACM_HAS_EMPTY_RESPONSE)
            return take_empty_response(rc, packet, index, now);
    }
    rc->stray_answers++; /* a duplicate, or an answer to no request */
    return dropped(rc, RDMACM_DROPPED_ANSWERS);
}

/* -- packets --------------------------------------------------------------------------------------------------------- */

/* Whether a P_Key matches: the same partition, and one of the two a full member. */
static bool matches_pkey(const struct rdmacm_rc *rc, uint32_t pkey) {
    uint32_t own = (uint32_t)(rc->send_bth >> 32) & 0xFFFF;
    return own & RDMACM_PKEY_BITS && !((own ^ pkey) & RDMACM_PKEY_BITS) && (own | pkey) & 0x8000;
}

static bool is_response(const struct rdmacm_packet_type *type) {
    return type->operation >= RDMACM_OPERATION_READ_RESPONSE;
}

/* Whether a connection takes packets of an opcode. The ends of XRC have one direction each. */
static bool takes_opcode(const struct rdmacm_rc *rc, uint8_t opcode) {
    const struct rdmacm_packet_type *type = &rdmacm_packet_types[opcode];
    return type->header_length && (opcode & RDMACM_TRANSPORT_MASK) == rc->transport &&
           (rc->transport != RDMACM_XRC || is_response(type) == !rc->domain);
}

/* Why the headers of a packet are refused, in the order of the checks of the Python engine. */
static enum rdmacm_refusal check_headers(const struct rdmacm_rc *rc, const uint8_t *data, size_t size) {
    size_t longest = RDMACM_LONGEST_PACKET + (rc->transport == RDMACM_XRC ? RDMACM_XRCETH_LENGTH : 0);
    if (size < RDMACM_SHORTEST_PACKET || size > longest)
        return RDMACM_REFUSED_LENGTH;
    const struct rdmacm_packet_type *type = &rdmacm_packet_types[data[0]];
    if (!takes_opcode(rc, data[0]))
        return RDMACM_REFUSED_OPCODE;
    if (size < type->header_length + (size_t)(data[1] >> 4 & 3) + RDMACM_ICRC_LENGTH)
        return RDMACM_REFUSED_LENGTH;
    if (rc->transport == RDMACM_UC && size & 3)
        return RDMACM_REFUSED_LENGTH;
    if (data[1] & 0xF)
        return RDMACM_REFUSED_VERSION;
    if ((rdmacm_load32(data + 4) & RDMACM_QPN_MASK) != rc->qp_num)
        return RDMACM_REFUSED_QPN;
    if (rc->failed || !(is_response(type) ? rc->can_send : rc->can_receive))
        return RDMACM_REFUSED_STATE;
    return matches_pkey(rc, (uint32_t)data[2] << 8 | data[3]) ? RDMACM_NOT_REFUSED : RDMACM_REFUSED_PKEY;
}

enum rdmacm_refusal rdmacm_rc_refuses(const struct rdmacm_rc *rc, const struct rdmacm_flow *flow, const uint8_t *data,
                                      size_t size) {
    enum rdmacm_refusal reason = check_headers(rc, data, size);
    if (reason == RDMACM_NOT_REFUSED && rdmacm_flow_identify(flow, data, size, 0) < 0)
        return RDMACM_REFUSED_ICRC;
    return reason;
}

static enum outcome take_packet(struct rdmacm_rc *rc, const struct rdmacm_flow *flow, const uint8_t *data, size_t size,
                                double now) {
    enum rdmacm_refusal reason = check_headers(rc, data, size);
    if (reason != RDMACM_NOT_REFUSED)
        return refused(rc, reason);
    int32_t identification = rdmacm_flow_identify(flow, data, size, (uint16_t)rc->identification);
    if (identification < 0)
        return refused(rc, RDMACM_REFUSED_ICRC);
    uint32_t word = rdmacm_load32(data + 8);
    size_t pad = data[1] >> 4 & 3;
    struct packet packet = {
        .opcode = (uint8_t)(data[0] & ~RDMACM_TRANSPORT_MASK),
        .type = rdmacm_packet_types[data[0]],
        .solicited = data[1] >> 7,
        .ack_requested = word >> 31,
        .psn = word & RDMACM_PSN_MASK,
        .body = data + RDMACM_BTH_LENGTH,
        .size = size - RDMACM_BTH_LENGTH - RDMACM_ICRC_LENGTH - pad,
    };
    if (rc->domain) {
        packet.srqn = rdmacm_load32(packet.body) & RDMACM_QPN_MASK;
        packet.body += RDMACM_XRCETH_LENGTH, packet.size -= RDMACM_XRCETH_LENGTH;
    }
    rc->identification = (uint32_t)identification;
    return is_response(&packet.type) ? take_response(rc, &packet, now) : take_request(rc, &packet);
}

size_t rdmacm_rc_take(struct rdmacm_rc *rc, const struct rdmacm_flow *flow, const uint8_t *data, size_t size,
                      size_t segment, double now) {
    size_t accepted = 0, step = segment ? segment : size;
    int32_t first = -1;
    for (size_t at = 0; at < size; at += step) {
        size_t length = size - at < step ? size - at : step;
        accepted += take_packet(rc, flow, data + at, length, now) == TAKEN;
        if (first < 0)
            first = (int32_t)rc->identification;
        rc->identification = (rc->identification + 1) & 0xFFFF;
    }
    /* A peer whose first packet had 0 sends trains that count from 0, or packets that all have 0. */
    if (first <= 0)
        rc->identification = 0;
    return accepted;
}
