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

/* Packets that nobody accepts are counted; `failed` and `send_failed` are set by what has gone wrong. */
struct rdmacm_ud {
    uint32_t qp_num, qkey, psn;
    uint32_t max_payload; /* bytes */
    bool is_ready, is_paused, failed, send_failed;

    const struct rdmacm_regions *regions; /* NULL: nothing is registered anew */
    uint64_t pd;

    /* queues: rings whose capacities are powers of two */
    struct rdmacm_ud_send *sends;
    size_t sends_capacity, sends_head, sends_count;
    struct rdmacm_srq *srq; /* where receives come from, the owner's; NULL: from `recvs` */
    struct rdmacm_recv *recvs;
    size_t recvs_capacity, recvs_head, recvs_count;

    struct rdmacm_completions completions;

    /* Packets dropped, since the owner has taken the counts. */
    bool has_refused;
    uint32_t refused[RDMACM_REFUSALS];

    struct rdmacm_flow flow_out; /* of the packets that were built last */
};

/* A queue pair in INIT. */
void rdmacm_ud_init(struct rdmacm_ud *ud, uint32_t qp_num);
/* Free the rings. The owner has let go of all pins. */
void rdmacm_ud_free(struct rdmacm_ud *ud);

/* Whether requests of this opcode may be queued. */
static inline bool rdmacm_ud_has(uint64_t opcode) {
    return opcode == RDMACM_WR_SEND || opcode == RDMACM_WR_SEND_WITH_IMM;
}

/* Queue a request. In the error states it completes as flushed. False, with nothing done, without memory, for a message
 * longer than any, and for a receive with a shared receive queue. */
bool rdmacm_ud_post_send(struct rdmacm_ud *ud, const struct rdmacm_ud_send *send);
bool rdmacm_ud_post_recv(struct rdmacm_ud *ud, const struct rdmacm_recv *recv);
/* The region of a local key was registered anew: receives that it does not have the memory of any more fail. */
void rdmacm_ud_look_up_again(struct rdmacm_ud *ud, uint32_t lkey);
/* To the error state: everything posted completes as flushed. */
void rdmacm_ud_flush(struct rdmacm_ud *ud);

/* Process the packets of a train, `segment` bytes each (the last may be shorter; 0: a single packet); return how many
 * were accepted. */
size_t rdmacm_ud_take(struct rdmacm_ud *ud, const uint8_t *data, size_t size, size_t segment,
                      const struct rdmacm_ud_source *from);

/* Why a packet is dropped whatever is posted; in the order of the checks of the engine. */
enum rdmacm_refusal rdmacm_ud_refuses(const struct rdmacm_ud *ud, const struct rdmacm_flow *flow, const uint8_t *data,
                                      size_t size);

/* Where the next packet goes; NULL: there is none to send. A request whose memory cannot be read ends the send
 * queue. */
void *rdmacm_ud_next_route(struct rdmacm_ud *ud);
/* Build up to `limit` packets to that place, at most RDMACM_BUILD_LIMIT, joined to trains of up to `train` bytes
 * (0: none); their requests complete. Return how many. */
size_t rdmacm_ud_build(struct rdmacm_ud *ud, struct rdmacm_out *out, size_t limit, size_t train);

#endif
