/* Unreliable datagrams over RoCEv2. Nothing here knows Python, sockets or clocks.
 *
 * docs/core.md describes it. The names and meanings are those of rdmacm.proto.roce.ud.UdEngine. The caller serialises
 * all calls for one queue pair.
 */
#ifndef RDMACM_UD_H
#define RDMACM_UD_H

#include "rdmacm_core.h"

enum { RDMACM_UD_MOST_PAYLOAD = 4096 };

/* Writes a GRH and `size` bytes behind it to memory that may be gone. False: it is. */
typedef bool rdmacm_write(const struct rdmacm_memory *memory, const uint8_t *grh, const uint8_t *data, size_t size);
/* Writes them to memory that is there. */
rdmacm_write rdmacm_ud_write;

/* Where a packet comes from and has arrived. */
struct rdmacm_ud_source {
    struct rdmacm_flow flow;
    uint8_t source[16], destination[16]; /* 4 or 16 bytes are used */
    uint8_t traffic_class, hop_limit;
    rdmacm_write *write; /* NULL: rdmacm_ud_write */
};

struct rdmacm_ud {
    union {
        struct rdmacm_queues queues;
        struct {
            RDMACM_QUEUES
        };
    };
    uint32_t qkey, psn;
    uint32_t max_payload; /* bytes */
    bool is_ready;
    struct rdmacm_flow flow_out; /* of the packets that were built last */
};

/* A queue pair in INIT. */
void rdmacm_ud_init(struct rdmacm_ud *ud, uint32_t qp_num);
/* Whether requests of this opcode may be queued. */
static inline bool rdmacm_ud_has(uint64_t opcode) {
    return opcode == RDMACM_WR_SEND || opcode == RDMACM_WR_SEND_WITH_IMM;
}

/* rdmacm_post_send(); false also for a message longer than any. */
bool rdmacm_ud_post_send(struct rdmacm_ud *ud, const struct rdmacm_send *send);
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
