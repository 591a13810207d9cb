/* Unreliable datagrams over RoCEv2. Nothing here knows Python, sockets or clocks.
 *
 * docs/core.md describes it. The names and meanings are those of rdmacm.proto.roce.ud.UdEngine. The caller serialises
 * all calls for one queue pair.
 */
#ifndef RDMACM_UD_H
#define RDMACM_UD_H

#include "rdmacm_core.h"

enum { RDMACM_UD_MOST_PAYLOAD = 4096 };

/* A datagram to send. */
struct rdmacm_ud_send {
    void *pin;          /* the owner's; keeps the buffer and the route alive */
    struct rdmacm_memory memory;
    void *route;         /* the owner's; packets of one route may be a train */
    struct rdmacm_flow flow;
    uint32_t dest_qpn, qkey;
    uint32_t imm; /* immediate data */
    bool has_imm, solicited;
    bool unsignaled; /* whether its success makes no completion for the user */
};

/* Where a packet comes from and has arrived. */
struct rdmacm_ud_source {
    struct rdmacm_flow flow;
    uint8_t source[16], destination[16]; /* 4 or 16 bytes are used */
    uint8_t traffic_class, hop_limit;
};

/* Python reads and writes the fields up to the queues directly. A queue that is Python's is empty here. */
struct rdmacm_ud {
    uint32_t qp_num, qkey, psn;
    uint32_t max_payload; /* bytes */
    bool is_ready, is_paused, failed, send_failed;
    bool core_sends, core_receives; /* whether the core has the send queue, and the receive queue */

    /* queues: rings whose capacities are powers of two */
    struct rdmacm_ud_send *sends;
    size_t sends_capacity, sends_head, sends_count;
    struct rdmacm_recv *recvs;
    size_t recvs_capacity, recvs_head, recvs_count;

    struct rdmacm_completions completions;

    struct rdmacm_flow flow_out; /* of the packets that were built last */
};

/* Free the rings. The owner has let go of all pins. */
void rdmacm_ud_free(struct rdmacm_ud *ud);

/* Whether requests of this opcode may be queued. */
static inline bool rdmacm_ud_has(uint64_t opcode) {
    return opcode == RDMACM_WR_SEND || opcode == RDMACM_WR_SEND_WITH_IMM;
}

/* Queue a request. False, with nothing done, without memory or if the queue is Python's; of a send also if it is too
 * long. */
bool rdmacm_ud_post_send(struct rdmacm_ud *ud, const struct rdmacm_ud_send *send);
bool rdmacm_ud_post_recv(struct rdmacm_ud *ud, const struct rdmacm_recv *recv);

/* Take the oldest request out of its queue, which has one. */
struct rdmacm_ud_send rdmacm_ud_pop_send(struct rdmacm_ud *ud);
struct rdmacm_recv rdmacm_ud_pop_recv(struct rdmacm_ud *ud);

/* Process the packets of a train, `segment` bytes each (the last may be shorter; 0: a single packet), up to the first
 * that the core does not know. Return the bytes of those processed; for the packet after them nothing was done.
 * `accepted` packets are in receives, `no_receive` were dropped because none was posted. */
size_t rdmacm_ud_take(struct rdmacm_ud *ud, const uint8_t *data, size_t size, size_t segment,
                      const struct rdmacm_ud_source *from, size_t *accepted, size_t *no_receive);

/* Why the engine drops a packet for the queue pair that rdmacm_ud_take() has left; in the order of its checks. */
enum rdmacm_refusal rdmacm_ud_refuses(struct rdmacm_ud *ud, const struct rdmacm_flow *flow, const uint8_t *data,
                                      size_t size);

/* Where the next packet goes; NULL: there is none to send. */
void *rdmacm_ud_next_route(struct rdmacm_ud *ud);
/* Build up to `limit` packets to that place, at most RDMACM_BUILD_LIMIT, joined to trains of up to `train` bytes
 * (0: none); their requests complete. Return how many. */
size_t rdmacm_ud_build(struct rdmacm_ud *ud, struct rdmacm_out *out, size_t limit, size_t train);

#endif
