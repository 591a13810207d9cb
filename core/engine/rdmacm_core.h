/* The compiled core: the protocol of connections over RoCEv2, reliable and unreliable.
 *
 * docs/core.md describes it. Nothing here knows Python, sockets or clocks; module.c is the glue to Python. PSNs and MSNs
 * have 24 bits and wrap. The caller serialises all calls for one connection and for one table of regions.
 */
#ifndef RDMACM_CORE_H
#define RDMACM_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "rdmacm_tables.h"

/* -- CRC-32 and the invariant CRC ---------------------------------------------------------------------------------- */

/* Make the tables, and find out what the processor has. Call it once, before anything else. */
void rdmacm_init(void);

/* CRC-32 as Ethernet and zlib have it: `crc` is 0 at the beginning, or the result for the bytes before. */
uint32_t rdmacm_crc32(uint32_t crc, const void *data, size_t length);

/* The same by tables alone, for comparison. */
uint32_t rdmacm_crc32_by_table(uint32_t crc, const void *data, size_t length);

/* How rdmacm_crc32 works here: "pclmulqdq", "armv8" or "table". */
const char *rdmacm_crc32_method(void);

/* The packets from one address and port to another (class Icrc of the Python engine). */
struct rdmacm_flow {
    uint32_t base; /* the CRC of the headers, for length 0, identification 0 and byte 4 of the BTH 0 */
    bool is_ipv6;
};

/* `address_length` is 4 or 16; `sport` and `dport` are UDP ports. */
void rdmacm_flow_init(struct rdmacm_flow *flow, const uint8_t *source, const uint8_t *destination,
                      size_t address_length, uint16_t sport, uint16_t dport);

/* The CRC to begin with for a packet of `length` bytes from its BTH to the end of its ICRC, at most 65507. */
uint32_t rdmacm_flow_start(const struct rdmacm_flow *flow, size_t length, uint16_t identification);

/* The IPv4 identification of a packet of `length` bytes whose CRC with `guess` is `crc`; -1 for a damaged packet. */
int32_t rdmacm_flow_solve(const struct rdmacm_flow *flow, uint32_t crc, size_t length, uint16_t guess);
/* That of a packet with a BTH and an ICRC; -1 for a damaged one. */
int32_t rdmacm_flow_identify(const struct rdmacm_flow *flow, const uint8_t *data, size_t size, uint16_t guess);

/* -- hash tables ----------------------------------------------------------------------------------------------------- */

/* Items by key, with linear probing. A peer names keys, so a search is bounded: half of the slots are empty at least. */
struct rdmacm_table {
    struct rdmacm_slot {
        void *item; /* NULL: the slot is empty */
        uint32_t key;
    } *slots;
    size_t capacity; /* a power of two, or 0 */
    size_t count;
};

/* The index where a key belongs. */
static inline size_t rdmacm_table_home(const struct rdmacm_table *table, uint32_t key) {
    return (size_t)(key * UINT32_C(2654435769) >> 7) & (table->capacity - 1); /* 2^32 divided by the golden ratio */
}

/* The slot of a key, or the empty one where it would be. There are slots. */
static inline struct rdmacm_slot *rdmacm_table_slot(const struct rdmacm_table *table, uint32_t key) {
    size_t at = rdmacm_table_home(table, key);
    while (table->slots[at].item && table->slots[at].key != key)
        at = (at + 1) & (table->capacity - 1);
    return &table->slots[at];
}

/* NULL for an unknown key. */
static inline void *rdmacm_table_find(const struct rdmacm_table *table, uint32_t key) {
    return table->capacity ? rdmacm_table_slot(table, key)->item : NULL;
}

/* False without memory, and for a key that is there. */
bool rdmacm_table_add(struct rdmacm_table *table, uint32_t key, void *item);
/* The item that was removed; NULL for an unknown key. */
void *rdmacm_table_remove(struct rdmacm_table *table, uint32_t key);
void rdmacm_table_free(struct rdmacm_table *table);

/* -- registered memory ----------------------------------------------------------------------------------------------- */

struct rdmacm_region {
    uint64_t address; /* as peers name it */
    uint64_t length;  /* bytes */
    uint64_t pd;      /* stands for the protection domain */
    uint8_t *memory;
    void *pin;      /* the owner's; keeps the memory alive */
    uint64_t owner;  /* stands for the owner's object: a region that has the same key later has another one */
    uint32_t access; /* bits of enum ibv_access_flags */
    size_t windows;  /* that are bound to it */
};

/* The regions of a device, and its windows. */
struct rdmacm_regions {
    struct rdmacm_table table;   /* of copies of struct rdmacm_region, by key */
    struct rdmacm_table windows; /* of struct rdmacm_window, by the upper 24 bits of their keys, which no region has */
};

/* False without memory, and for a key that is there or is 0. */
bool rdmacm_regions_add(struct rdmacm_regions *regions, uint32_t key, const struct rdmacm_region *region);
/* The pin of the region that was removed; NULL for an unknown key, and while windows are bound to the region. */
void *rdmacm_regions_remove(struct rdmacm_regions *regions, uint32_t key);
/* How many windows are bound to the region of a key. */
size_t rdmacm_regions_bound(const struct rdmacm_regions *regions, uint32_t key);
/* The `length` bytes at `address` of a region; NULL if key, protection domain, permission or range is wrong. `pin`, which
 * may be NULL, becomes the region's. */
uint8_t *rdmacm_regions_find(const struct rdmacm_regions *regions, uint64_t pd, uint32_t key, uint64_t address,
                             uint64_t length, uint32_t access, void **pin);
/* Whether bytes of this process are memory of a key, with that access. */
bool rdmacm_regions_have(const struct rdmacm_regions *regions, uint64_t pd, uint32_t key, const uint8_t *data,
                         uint64_t length, uint32_t access);
/* Whether a peer may access the whole region of a key so. */
bool rdmacm_regions_permit(const struct rdmacm_regions *regions, uint64_t pd, uint32_t key, uint32_t access);

/* -- memory windows -------------------------------------------------------------------------------------------------- */

/* A window. Its owner has the structure. The protection domain and the type are set when it is allocated. */
struct rdmacm_window {
    struct rdmacm_regions *regions; /* NULL: it is not allocated */
    uint64_t pd;
    bool is_type_2;
    uint32_t key; /* of the last bind, or the first one */
    struct rdmacm_region *region; /* NULL: it is not bound */
    /* While it is bound: */
    uint64_t address, length; /* its range, in addresses of the region */
    uint64_t qp;              /* stands for the queue pair that has bound it; only its peer may use one of type 2 */
    uint64_t number;          /* that of the bind; 0: it is not bound */
    uint32_t access;          /* bits of enum ibv_access_flags */
};

/* What a BIND_MW binds to what. */
struct rdmacm_bind {
    struct rdmacm_window *window; /* NULL: it cannot be bound here */
    uint32_t key;                 /* its key once it is bound */
    uint32_t region_key;          /* the region */
    uint64_t owner;               /* its `owner`; 0: there is no region */
    uint64_t address, length;     /* the range in it; 0 bytes take its region away from a window of type 1 */
    uint64_t number;              /* not 0 */
    uint32_t access;
};

/* False without memory, and where a window has the upper 24 bits of the key. */
bool rdmacm_window_allocate(struct rdmacm_regions *regions, struct rdmacm_window *window, uint32_t key);
/* Unbind it too. */
void rdmacm_window_deallocate(struct rdmacm_window *window);
/* Bind a window for a queue pair; false, with nothing done, where the rules do not allow it. */
bool rdmacm_window_bind(struct rdmacm_regions *regions, uint64_t pd, uint64_t qp, const struct rdmacm_bind *bind);
/* Unbind a window of type 2; false if the key is not that of one that the queue pair has bound. */
bool rdmacm_window_invalidate(struct rdmacm_regions *regions, uint64_t pd, uint64_t qp, uint32_t key);
/* Unbind the windows of type 2 that a queue pair has bound. */
void rdmacm_windows_free(struct rdmacm_regions *regions, uint64_t qp);
/* Deallocate all windows. */
void rdmacm_windows_forget(struct rdmacm_regions *regions);
/* As rdmacm_regions_find(), by the key of a window, for the peer of a queue pair. */
uint8_t *rdmacm_window_find(const struct rdmacm_regions *regions, uint64_t pd, uint64_t qp, uint32_t key,
                            uint64_t address, uint64_t length, uint32_t access, void **pin);

/* -- work requests and completions ----------------------------------------------------------------------------------- */

/* Part of the local memory of a request. */
struct rdmacm_element {
    uint8_t *data;
    uint32_t length; /* bytes, not 0 */
    uint32_t lkey;   /* the key that the user has named it by; 0: the owner has found the memory */
};

/* The local memory of a request. The elements live as long as its pin. */
struct rdmacm_memory {
    const struct rdmacm_element *elements;
    uint32_t count;
    bool is_inaccessible; /* whether a key or a range was wrong; then there are no elements */
    uint64_t length;      /* bytes of all elements */
};

/* A request of the send queue. */
struct rdmacm_send {
    void *pin;                   /* the owner's; keeps the memory alive */
    struct rdmacm_memory memory; /* the source of SEND, WRITE and ATOMIC WRITE, the destination of READ and atomics */
    uint32_t length;             /* bytes of the message, of the response to a READ, or that a FLUSH names */
    uint32_t rkey;
    union {
        struct {
            uint64_t remote_addr;
            uint64_t compare_add, swap; /* the operands of an atomic */
        };
        struct { /* of a datagram */
            void *route; /* the owner's; packets of one route may be a train */
            struct rdmacm_flow flow;
            uint32_t dest_qpn, qkey;
        };
    };
    uint32_t word;              /* immediate data, or the key that is invalidated */
    uint32_t remote_srqn;       /* XRC: the number of the peer's shared receive queue */
    const struct rdmacm_bind *bind; /* BIND_MW; lives as long as the pin */
    uint8_t opcode;             /* enum ibv_wr_opcode */
    uint8_t placement, level;   /* of a FLUSH: enum ibv_placement_type, enum ibv_selectivity_level */
    bool solicited;
    bool fence;      /* whether it begins when earlier READs, atomics, FLUSHes and ATOMIC WRITEs are complete */
    bool unsignaled; /* whether its success makes no completion for the user */
    /* Set when the request begins. */
    bool had_icrc_twice; /* FLUSH: whether the last packet had rxe's ICRC */
    uint32_t first_psn, last_psn;
    uint32_t received_bytes; /* READ: bytes of the response that have arrived */
    /* READ, atomics and ATOMIC WRITE: packets of the response that have been requested. FLUSH: how often it was sent. */
    uint32_t requested_packets;
};

/* How the requests of an opcode are sent. */
struct rdmacm_request_type {
    uint8_t flags;                     /* 0: the core does not know the opcode */
    uint8_t word_kind;                 /* what the last packet of a message has, enum rdmacm_word */
    uint8_t first, middle, last, only; /* the opcodes of its packets */
};

enum {
    RDMACM_IS_DATA = 1, /* a message: SEND or WRITE; the others are requests of one packet each */
    RDMACM_IS_WRITE = 2,
    RDMACM_IS_READ = 4,
    RDMACM_IS_ATOMIC = 8,
    RDMACM_IS_FLUSH = 16,
    RDMACM_IS_ATOMIC_WRITE = 32,
    RDMACM_IS_LOCAL = 64, /* sends nothing: it is complete once this side has executed it */
    /* Its response is a READ response of no bytes (InfiniBand Architecture, annex A19). */
    RDMACM_HAS_EMPTY_RESPONSE = RDMACM_IS_FLUSH | RDMACM_IS_ATOMIC_WRITE,
    /* An ACK of it or of a later one completes it. The others need their own response, for the data in it. */
    RDMACM_IS_ACKNOWLEDGED = RDMACM_IS_DATA | RDMACM_HAS_EMPTY_RESPONSE,
    RDMACM_REQUEST_TYPES = RDMACM_WR_ATOMIC_WRITE + 1,
};

extern const struct rdmacm_request_type rdmacm_request_types[RDMACM_REQUEST_TYPES];
/* By opcode. */
extern const struct rdmacm_packet_type rdmacm_packet_types[256];

/* A request of a receive queue. */
struct rdmacm_recv {
    void *pin;
    struct rdmacm_memory memory;
};

/* The region of a local key was registered anew: a receive whose memory the key does not stand for any more, in a
 * protection domain, becomes inaccessible. */
void rdmacm_recv_look_up(struct rdmacm_recv *recv, const struct rdmacm_regions *regions, uint64_t pd, uint32_t lkey);

struct rdmacm_completion {
    void *pin; /* that of the request */
    uint32_t byte_len;
    uint8_t status; /* enum ibv_wc_status */
    uint8_t opcode; /* enum ibv_wr_opcode: of a send; of a receive WRITE_WITH_IMM if a WRITE has taken it */
    uint8_t word_kind;
    bool is_recv;
    bool solicited;
    bool unsignaled; /* the user does not see it */
    bool is_datagram;
    bool is_ipv6;    /* a datagram came in a packet of IPv6, else of IPv4 */
    uint32_t word;   /* immediate data, or the key that the peer has invalidated */
    uint32_t src_qp; /* of a datagram */
    uint32_t srqn;   /* of an XRC target: the shared receive queue that it is for */
};

/* Those that the owner has not taken; there is room for everything that is posted. */
struct rdmacm_completions {
    struct rdmacm_completion *items;
    size_t capacity, count;
};

struct rdmacm_cq;

/* A shared receive queue: several connections, and the owner, take receives from it. */
struct rdmacm_srq {
    struct rdmacm_recv *recvs; /* a ring, the oldest first */
    size_t recvs_capacity, recvs_head, recvs_count;
    size_t max_recvs;      /* it holds at most */
    size_t limit;          /* once fewer than this are left, it becomes 0; 0: never */
    bool is_limit_reached; /* whether that was so since the owner has looked */
    /* In an XRC domain: */
    uint64_t pd;          /* stands for the protection domain whose memory requests for it may touch */
    struct rdmacm_cq *cq; /* where its receives complete; NULL: the owner knows */
};

/* An empty queue. */
void rdmacm_srq_init(struct rdmacm_srq *srq, size_t max_recvs);
/* Free the ring. The owner has let go of all pins. */
void rdmacm_srq_free(struct rdmacm_srq *srq);
/* Queue a receive. False, with nothing done, if the queue is full or without memory. */
bool rdmacm_srq_post(struct rdmacm_srq *srq, const struct rdmacm_recv *recv);
/* The oldest receive; NULL: the queue is empty. */
static inline const struct rdmacm_recv *rdmacm_srq_first(const struct rdmacm_srq *srq) {
    return srq->recvs_count ? &srq->recvs[srq->recvs_head] : NULL;
}
/* Take it, for a message. False: the queue is empty; that may reach the limit, too. */
bool rdmacm_srq_take(struct rdmacm_srq *srq, struct rdmacm_recv *recv);
/* rdmacm_recv_look_up() for all. */
void rdmacm_srq_look_up(struct rdmacm_srq *srq, const struct rdmacm_regions *regions, uint64_t pd, uint32_t lkey);

/* A responder resource: what is kept of a request to answer it again (InfiniBand Architecture 9.4.4). */
struct rdmacm_resource {
    uint64_t address;  /* READ: the memory to send */
    uint64_t original; /* the value before an atomic */
    uint64_t pd;       /* READ: stands for the protection domain of the memory */
    uint32_t rkey;
    uint32_t length; /* bytes; 0 for an ATOMIC WRITE or FLUSH */
    uint32_t first_psn, last_psn;
    int32_t operation; /* READ, ATOMIC, ATOMIC_WRITE or FLUSH; 0: none */
};

/* Packets the responder has to send. */
struct rdmacm_response {
    struct rdmacm_resource of; /* what is answered; its operation is 0 for an ACK or NAK */
    bool is_repeated;
    uint32_t psn, last_psn; /* of the packets still to be sent */
    uint32_t offset;        /* bytes that were sent */
    uint32_t syndrome, msn;
};

/* What a queue pair counts. */
enum rdmacm_count {
    RDMACM_TIMEOUTS,            /* retransmission timers that have expired */
    RDMACM_RETRIES,             /* retransmissions */
    RDMACM_SEQUENCE_NAKS,       /* NAKs received because of a lost request */
    RDMACM_RNR_NAKS,            /* NAKs received because the peer has no receive */
    RDMACM_IMPLIED_NAKS,        /* answers received that show that an earlier one was lost */
    RDMACM_EARLY_REQUESTS,      /* NAKs sent because of a lost request */
    RDMACM_DROPPED_SEQUENCE,    /* packets after a lost one */
    RDMACM_DROPPED_DUPLICATES,  /* requests that were executed before */
    RDMACM_DROPPED_NOT_READY,   /* SENDs without a receive */
    RDMACM_DROPPED_REFUSED,     /* READ requests that came again when their memory was gone */
    RDMACM_DROPPED_ANSWERS,     /* answers to no request that is outstanding */
    RDMACM_RETRIES_EXCEEDED,    /* connections that ended as no retry was left */
    RDMACM_RNR_RETRIES_EXCEEDED,
    RDMACM_COUNTS,
};

/* Since the owner has taken them. */
struct rdmacm_counts {
    bool has_any; /* whether one of them is not 0 */
    uint32_t of[RDMACM_COUNTS];
};

/* Why an engine drops a packet; the names are those of EngineCounters.dropped. */
enum rdmacm_refusal {
    RDMACM_REFUSED_LENGTH,
    RDMACM_REFUSED_OPCODE,
    RDMACM_REFUSED_VERSION,
    RDMACM_REFUSED_QPN,
    RDMACM_REFUSED_STATE,
    RDMACM_REFUSED_PKEY,
    RDMACM_REFUSED_QKEY,
    RDMACM_REFUSED_ICRC,
    RDMACM_REFUSED_NO_RECEIVE,
    RDMACM_REFUSED_SHORT_RECEIVE,
    RDMACM_REFUSALS,
    RDMACM_NOT_REFUSED = RDMACM_REFUSALS,
};

/* -- the queues of a queue pair -------------------------------------------------------------------------------------- */

/* Rings have capacities that are powers of two. */
#define RDMACM_QUEUES                                                                                                  \
    uint8_t transport; /* RDMACM_RC, RDMACM_UC, RDMACM_XRC or RDMACM_UD: that of its opcodes */                        \
    bool failed, paused;                                                                                               \
    bool send_failed; /* unreliable: a request has failed, and others complete as flushed until the owner resumes */   \
    bool has_reached_limit; /* whether it has taken a receive at the limit of its queue, since the wire has looked */  \
    bool has_refused;       /* whether one of `refused` is not 0 */                                                    \
    uint32_t qp_num;                                                                                                   \
    int32_t srqn; /* XRC target: the number of the queue that the last request has named; -1: none */                  \
    struct rdmacm_regions *regions; /* NULL: requests that name memory are not taken */                                \
    uint64_t pd;                    /* XRC target: that of `srq` */                                                    \
    struct rdmacm_send *sends;                                                                                         \
    size_t sends_capacity, sends_head, sends_count;                                                                    \
    struct rdmacm_srq *srq; /* where receives come from, the owner's; NULL: from `recvs`. XRC target: of a request */  \
    struct rdmacm_recv *recvs;                                                                                         \
    size_t recvs_capacity, recvs_head, recvs_count;                                                                    \
    /* The SEND in progress; unreliable: or one that was abandoned, whose receive is the next one. Pin NULL: none. */  \
    struct rdmacm_recv current_recv;                                                                                   \
    struct rdmacm_completions completions;                                                                             \
    struct rdmacm_counts counts;                                                                                       \
    uint32_t refused[RDMACM_REFUSALS]; /* packets that nobody needs to know of, since the owner has taken the counts */

/* What queue pairs of all types have. */
struct rdmacm_queues {
    RDMACM_QUEUES
};

/* Queue a request. In the error states it completes as flushed. False, with nothing done, without memory, for a message
 * that is too long, and for a receive with a shared receive queue or XRC. */
bool rdmacm_post_send(struct rdmacm_queues *queues, const struct rdmacm_send *send);
bool rdmacm_post_recv(struct rdmacm_queues *queues, const struct rdmacm_recv *recv);
/* The region of a local key was registered anew: receives that it does not have the memory of any more fail. */
void rdmacm_look_up_again(struct rdmacm_queues *queues, uint32_t lkey);
/* The same of all requests, also of those that have begun, and for a region that is gone: for an owner whose pins do not
 * keep memory alive. */
void rdmacm_revoke(struct rdmacm_queues *queues, uint32_t lkey);

/* -- a connection ---------------------------------------------------------------------------------------------------- */

/* The names and meanings are those of rdmacm.proto.roce.rc.state.RcState. An unreliable connection
 * (rdmacm.proto.roce.uc.UcEngine) leaves most of them unused. */
struct rdmacm_rc {
    union {
        struct rdmacm_queues queues;
        struct {
            RDMACM_QUEUES
        };
    };

    /* path */
    struct rdmacm_flow flow_out, flow_in;
    uint64_t send_bth;
    uint32_t path_mtu; /* bytes */
    uint32_t identification;

    /* states */
    bool can_send, can_receive, rnr_waiting, retransmitting;
    uint8_t failure;       /* the status of the error that has ended it; 0: none, or rdmacm_rc_flush() has */
    bool has_failed_peer;  /* whether that was an error of a request of the peer */
    bool flush_icrc_twice; /* whether FLUSHes get rxe's ICRC at first */

    /* requester */
    uint32_t next_psn, end_psn, unacked_psn;
    uint32_t window, loss_window, ack_interval; /* packets */
    uint32_t outstanding_reads, max_rd_atomic;
    int32_t retry_cnt, rnr_retry, retries_left, rnr_retries_left;
    uint32_t stray_answers;
    double timeout;  /* seconds; 0: none */
    double deadline; /* seconds of the caller's clock */
    bool has_deadline;

    /* responder */
    const struct rdmacm_table *domain; /* XRC target: the queues that requests name, by number; NULL: it is none */
    uint64_t qp; /* stands for the queue pair, for windows */
    uint32_t access;
    uint32_t expected_psn, executed_psn, msn;
    uint32_t max_dest_rd_atomic;
    uint32_t min_rnr_timer; /* the code of RNR NAKs, 0 to 31 */
    bool nak_sent;
    int32_t operation; /* values of Operation */
    uint64_t message_offset;
    uint32_t write_rkey, write_length;
    uint64_t write_address;
    int32_t ack_psn; /* -1: none */
    uint32_t ack_aeth;

    /* queues */
    size_t outstanding_count; /* of `sends`: these have PSNs, the others wait for theirs */
    size_t send_index;
    struct rdmacm_response *responses;
    size_t responses_capacity, responses_head, responses_count;
    size_t unanswered, waiting_flushes; /* in the ring: first responses of resources that are kept, those of FLUSHes */
    struct rdmacm_resource *resources; /* the latest ones, the next one to be replaced at `resources_next` */
    size_t resources_capacity, resources_next, resources_count;
};

/* A connection in INIT. One of XRC is an initiator, or a target with a `domain`. */
void rdmacm_rc_init(struct rdmacm_rc *rc, uint8_t transport, uint32_t qp_num, const struct rdmacm_table *domain);
/* Free the rings. The owner has let go of all pins. */
void rdmacm_rc_free(struct rdmacm_rc *rc);

/* What takes a connection from INIT to RTR, and from RTR to RTS: RtrAttributes and RtsAttributes of proto/engine.py. */
struct rdmacm_rtr {
    uint32_t dest_qp_num, rq_psn, path_mtu, max_dest_rd_atomic, min_rnr_timer, access, pkey;
};

struct rdmacm_rts {
    uint32_t sq_psn, max_rd_atomic;
    int32_t retry_cnt, rnr_retry;
    double timeout; /* seconds; 0: none */
};

enum { RDMACM_MOST_RESOURCES = 1024 }; /* responder resources of a connection */

/* False, with nothing done, without memory, and for a path MTU or a number of resources that no connection has. */
bool rdmacm_rc_ready_to_receive(struct rdmacm_rc *rc, const struct rdmacm_rtr *rtr);
void rdmacm_rc_ready_to_send(struct rdmacm_rc *rc, const struct rdmacm_rts *rts);
/* In RTS or SQD: change how requests are sent. The PSN does not change. */
void rdmacm_rc_set_send_attributes(struct rdmacm_rc *rc, const struct rdmacm_rts *rts, double now);
/* Change how many READs and atomics of the peer may be outstanding. False as rdmacm_rc_ready_to_receive(). */
bool rdmacm_rc_set_resources(struct rdmacm_rc *rc, uint32_t count);

/* Whether requests of this opcode may be queued. */
static inline bool rdmacm_rc_has(const struct rdmacm_rc *rc, uint64_t opcode) {
    if (opcode >= RDMACM_REQUEST_TYPES || !rdmacm_request_types[opcode].flags || rc->domain)
        return false;
    const struct rdmacm_request_type *type = &rdmacm_request_types[opcode];
    return type->flags & RDMACM_IS_LOCAL || rdmacm_packet_types[type->only | rc->transport].header_length;
}

/* Process the packets of a train of a flow, `segment` bytes each (the last may be shorter; 0: a single packet); return how
 * many were accepted. */
size_t rdmacm_rc_take(struct rdmacm_rc *rc, const struct rdmacm_flow *flow, const uint8_t *data, size_t size,
                      size_t segment, double now);

/* Why a connection drops a packet that names it and that rdmacm_rc_take() has not processed, whatever the connection is
 * in the midst of; in the order of the checks of the engine. */
enum rdmacm_refusal rdmacm_rc_refuses(const struct rdmacm_rc *rc, const struct rdmacm_flow *flow, const uint8_t *data,
                                      size_t size);

/* End the connection: everything posted completes, the oldest send with `status`, all others as flushed. If it is
 * unreliable, a `status` that is an error ends the sends alone. */
void rdmacm_rc_fail(struct rdmacm_rc *rc, uint8_t status);

/* End the connection for its owner: everything posted completes as flushed, and nothing more is sent. One that has failed
 * before still answers. */
void rdmacm_rc_flush(struct rdmacm_rc *rc);

/* If the deadline has come, begin to retransmit, or end the pause that an RNR NAK has asked for; without a retry left,
 * the connection fails. */
void rdmacm_rc_timer(struct rdmacm_rc *rc, double now);

/* Whether rdmacm_rc_build may return something: 0 nothing, 1 one ACK, which may wait for a moment, 2 packets. */
int rdmacm_rc_to_send(const struct rdmacm_rc *rc);

enum {
    RDMACM_BUILD_LIMIT = 1024, /* packets of one call */
    RDMACM_MOST_ELEMENTS = 32, /* of a request */
    RDMACM_MOST_PIECES = 4 * RDMACM_BUILD_LIMIT,
    RDMACM_MOST_HEADERS = 60, /* bytes of headers, padding and ICRC of a packet */
    RDMACM_MOST_COPIED = 512, /* bytes of payload that are copied behind the headers: more pieces would take longer */
};

struct rdmacm_datagram {
    size_t first, count; /* its pieces in `pieces` */
    size_t bytes;
    size_t segment; /* bytes of a packet of a train; 0: a single packet */
};

/* Datagrams ready for the wire. The pieces point to the buffers of the requests and regions and to `headers`; they are
 * valid until the next call for the connection or its regions. */
struct rdmacm_out {
    struct rdmacm_datagram datagrams[RDMACM_BUILD_LIMIT];
    size_t datagrams_count, packets_count;
    struct iovec pieces[RDMACM_MOST_PIECES];
    size_t pieces_count;
    uint8_t headers[(RDMACM_MOST_HEADERS + RDMACM_MOST_COPIED) * RDMACM_BUILD_LIMIT]; /* and short payloads */
    size_t headers_used;
    /* the open train */
    const struct rdmacm_flow *flow;
    size_t train;   /* bytes it may have */
    size_t packets; /* it has */
    size_t joined;  /* pieces of these */
    size_t left;    /* packets it may still take */
};

/* Packets of a flow are added between these two; a train has up to `train` bytes (0: no trains). */
void rdmacm_out_begin(struct rdmacm_out *out, const struct rdmacm_flow *flow, size_t train);
void rdmacm_out_finish(struct rdmacm_out *out);

/* Where the next headers go: there is room for the longest, and for three pad bytes and the ICRC. */
static inline uint8_t *rdmacm_out_headers(struct rdmacm_out *out) { return out->headers + out->headers_used; }

/* Whether there is room for one more packet, with the most pieces that one may have. */
static inline bool rdmacm_out_has_room(const struct rdmacm_out *out) {
    return out->packets_count < RDMACM_BUILD_LIMIT && out->pieces_count + RDMACM_MOST_ELEMENTS + 2 <= RDMACM_MOST_PIECES;
}

/* Add a packet: its headers, which are at rdmacm_out_headers(), and as payload `length` bytes of elements from byte
 * `offset` on. It joins the train if its size allows. */
void rdmacm_out_add(struct rdmacm_out *out, size_t headers_length, const struct rdmacm_element *elements,
                    uint64_t offset, size_t length);
/* Add a packet without payload that has rxe's ICRC of a FLUSH (rdmacm.proto.roce.icrc). */
void rdmacm_out_add_twice(struct rdmacm_out *out, size_t headers_length);

/* Build up to `limit` packets, at most RDMACM_BUILD_LIMIT, joined to trains of up to `train` bytes (0: none). */
void rdmacm_rc_build(struct rdmacm_rc *rc, struct rdmacm_out *out, size_t limit, size_t train, double now);
/* Build a packet that a live peer answers, and that has no other effect; unreliable, or XRC target: nothing. */
void rdmacm_rc_build_probe(struct rdmacm_rc *rc, struct rdmacm_out *out);

/* -- helpers for the files of the core ------------------------------------------------------------------------------- */

/* Make room for `more` entries behind `count` in a ring of entries of `size` bytes; `place` has the pointer to it. */
bool rdmacm_grow(void *place, size_t *capacity, size_t *head, size_t count, size_t more, size_t size);

/* A ring `x` of a structure has the members x, x_capacity (a power of two, or 0), x_head and x_count. */
#define RDMACM_RING_AT(of, ring, index) (&(of)->ring[((of)->ring##_head + (index)) & ((of)->ring##_capacity - 1)])
#define RDMACM_RING_RESERVE(of, ring)                                                                                  \
    rdmacm_grow(&(of)->ring, &(of)->ring##_capacity, &(of)->ring##_head, (of)->ring##_count, 1, sizeof *(of)->ring)
#define RDMACM_RING_DROP(of, ring)                                                                                     \
    ((of)->ring##_head = ((of)->ring##_head + 1) & ((of)->ring##_capacity - 1), (of)->ring##_count--)

/* Copy bytes into memory from byte `offset` on, where there is room for them. */
void rdmacm_scatter(const struct rdmacm_memory *memory, uint64_t offset, const uint8_t *data, size_t size);
/* Make memory that has some of a key inaccessible, where the key does not stand for that any more. */
void rdmacm_memory_look_up(struct rdmacm_memory *memory, const struct rdmacm_regions *regions, uint64_t pd, uint32_t lkey,
                           uint32_t access);
/* The memory of a protection domain that a peer's request names; NULL if it may not have it. */
static inline uint8_t *rdmacm_pd_memory(const struct rdmacm_rc *rc, uint64_t pd, uint32_t rkey, uint64_t address,
                                        uint32_t length, uint32_t access) {
    uint8_t *found = rdmacm_regions_find(rc->regions, pd, rkey, address, length, access, NULL);
    return found ? found : rdmacm_window_find(rc->regions, pd, rc->qp, rkey, address, length, access, NULL);
}
/* The same in that of the connection. */
static inline uint8_t *rdmacm_rc_memory(const struct rdmacm_rc *rc, uint32_t rkey, uint64_t address, uint32_t length,
                                        uint32_t access) {
    return rdmacm_pd_memory(rc, rc->pd, rkey, address, length, access);
}

/* Add a completion: its other fields are 0. There is room for those of all that is posted. */
struct rdmacm_completion *rdmacm_complete(struct rdmacm_queues *queues, void *pin, uint32_t byte_len);
/* The oldest request is complete. */
void rdmacm_end_send(struct rdmacm_queues *queues, uint32_t byte_len);
/* All requests end, the oldest with a status, the others as flushed. */
void rdmacm_flush_sends(struct rdmacm_queues *queues, uint8_t status);
/* Take the next receive for a message, with room for its completion. False: there is none, or no memory. */
bool rdmacm_take_recv(struct rdmacm_queues *queues, struct rdmacm_recv *recv);
/* A receive that was taken ends. */
void rdmacm_flush_recv(struct rdmacm_queues *queues, void *pin, uint8_t status);
/* The SEND in progress ends with a status, and the other receives as flushed. */
void rdmacm_flush_current(struct rdmacm_queues *queues, uint8_t status);
void rdmacm_flush_recvs(struct rdmacm_queues *queues);
static inline void rdmacm_count_refused(struct rdmacm_queues *queues, enum rdmacm_refusal reason) {
    queues->refused[reason]++;
    queues->has_refused = true;
}
/* Free the rings and the completions. The owner has let go of all pins. */
void rdmacm_queues_free(struct rdmacm_queues *queues);

static inline uint32_t rdmacm_psn_add(uint32_t psn, uint32_t count) { return (psn + count) & RDMACM_PSN_MASK; }

/* How far `a` is after `b`, from 0 to 2^24 - 1. */
static inline uint32_t rdmacm_psn_after(uint32_t a, uint32_t b) { return (a - b) & RDMACM_PSN_MASK; }

/* Whether `a` comes after `b`. */
static inline bool rdmacm_psn_is_after(uint32_t a, uint32_t b) {
    uint32_t distance = rdmacm_psn_after(a, b);
    return distance && !(distance & RDMACM_PSN_HALF);
}

/* PSNs of a message or READ response of `length` bytes. */
static inline uint32_t rdmacm_packets(const struct rdmacm_rc *rc, uint32_t length) {
    return length ? (length - 1) / rc->path_mtu + 1 : 1;
}

/* PSNs of a request. */
static inline uint32_t rdmacm_send_packets(const struct rdmacm_rc *rc, const struct rdmacm_send *send) {
    bool has_several = rdmacm_request_types[send->opcode].flags & (RDMACM_IS_DATA | RDMACM_IS_READ);
    return has_several ? rdmacm_packets(rc, send->length) : 1;
}

static inline uint32_t rdmacm_load32(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | (uint32_t)p[3];
}

static inline uint64_t rdmacm_load64(const uint8_t *p) {
    return (uint64_t)rdmacm_load32(p) << 32 | rdmacm_load32(p + 4);
}

static inline void rdmacm_store32(uint8_t *p, uint32_t value) {
    p[0] = (uint8_t)(value >> 24);
    p[1] = (uint8_t)(value >> 16);
    p[2] = (uint8_t)(value >> 8);
    p[3] = (uint8_t)value;
}

static inline void rdmacm_store64(uint8_t *p, uint64_t value) {
    rdmacm_store32(p, (uint32_t)(value >> 32));
    rdmacm_store32(p + 4, (uint32_t)value);
}

/* A READ response is requested in parts: one past the last packet of the part that packet `index` is in. */
static inline uint32_t rdmacm_read_part_end(const struct rdmacm_rc *rc, uint32_t index) {
    return (index / rc->ack_interval + 1) * rc->ack_interval;
}

void rdmacm_crc32_init(void);
void rdmacm_icrc_init(void);
void rdmacm_start_timer(struct rdmacm_rc *rc, double now);
void rdmacm_respond(struct rdmacm_rc *rc, uint32_t psn, uint32_t syndrome);
/* Add a response whose fields are 0, but an ACK's syndrome and the MSN. NULL without memory, and for more than may wait. */
struct rdmacm_response *rdmacm_add_response(struct rdmacm_rc *rc);
/* Drop the first one. */
void rdmacm_drop_response(struct rdmacm_rc *rc);
/* Whether as many responses of FLUSHes wait as may. */
bool rdmacm_has_most_flushes(const struct rdmacm_rc *rc);
void rdmacm_fail_receive(struct rdmacm_rc *rc, uint8_t status);

/* Whether there are request packets to send. */
static inline bool rdmacm_wants_to_send(const struct rdmacm_rc *rc) {
    return !rc->rnr_waiting &&
           (rc->next_psn != rc->end_psn || (rc->sends_count > rc->outstanding_count && !rc->paused));
}

void rdmacm_count(struct rdmacm_rc *rc, enum rdmacm_count count);
void rdmacm_retransmit(struct rdmacm_rc *rc, uint32_t psn, double now);
/* The oldest request is complete. */
void rdmacm_complete_send(struct rdmacm_rc *rc, uint32_t byte_len);
/* Everything up to `psn` needs no retransmission any more. */
void rdmacm_acknowledged(struct rdmacm_rc *rc, uint32_t psn);

#endif
