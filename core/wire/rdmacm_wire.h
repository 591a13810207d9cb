/* The socket layer of the compiled core: it reads UDP sockets, finds the connection of each packet, sends what follows,
 * and collects completions. docs/core.md describes it.
 *
 * One mutex guards wires, their connections, regions and completion queues. The caller of every function here holds it,
 * unless the function's comment says otherwise. Nothing here knows Python.
 */
#ifndef RDMACM_WIRE_H
#define RDMACM_WIRE_H

#include "rdmacm_core.h"
#include "rdmacm_ud.h"

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>

/* -- the lock -------------------------------------------------------------------------------------------------------- */

/* The lock of a runtime: a mutex that its holder may take again. The thread that serves peers never takes it. */
struct rdmacm_lock {
    pthread_mutex_t mutex;
    _Atomic(uintptr_t) owner; /* stands for the thread that holds it; 0: none */
    unsigned depth;           /* how often the owner has taken it */
};

bool rdmacm_lock_init(struct rdmacm_lock *lock);
void rdmacm_lock_destroy(struct rdmacm_lock *lock);
/* Take it if no other thread has it. */
bool rdmacm_lock_try(struct rdmacm_lock *lock);
/* Wait for it. */
void rdmacm_lock_take(struct rdmacm_lock *lock);
/* False, with nothing done, if this thread does not have it. */
bool rdmacm_lock_release(struct rdmacm_lock *lock);

/* The mutex of the core: one for the process, because the memory and the completion queues that wires use are not those
 * of one wire. Its holder waits for nothing but system calls, and so never for the interpreter. fork(2) waits for it: in
 * the child nobody has it, and nothing that it guards is half changed. */
void rdmacm_enter(void);
/* Take it if nobody has it. */
bool rdmacm_try_enter(void);
void rdmacm_leave(void);
/* When the core is loaded. */
void rdmacm_mutex_init(void);
/* End the process if this thread has the mutex where it may wait for the interpreter: in builds with checks. */
#ifdef RDMACM_CHECKS
void rdmacm_check_outside(const char *where);
#else
static inline void rdmacm_check_outside(const char *where) { (void)where; }
#endif

/* The first member of each pin (rdmacm_send.pin and others), so that pins can be listed. */
struct rdmacm_pin {
    struct rdmacm_pin *next;
};

/* -- completion queues ----------------------------------------------------------------------------------------------- */

/* A completion of the core, or one that the owner has made. */
struct rdmacm_entry {
    void *object; /* the owner's completion; NULL: one of the core */
    struct rdmacm_completion completion;
    uint32_t qp_num; /* of either */
};

struct rdmacm_cq {
    struct rdmacm_entry *entries; /* a ring */
    size_t capacity, head;
    size_t count;   /* only the functions below change it */
    size_t limit;   /* completions it has room for */
    bool overrun;   /* whether the core has lost one */
    bool watched;   /* whether the owner wants to know what is added */
    bool is_listed; /* in rdmacm_wire.added, because it is watched or has overflowed */
    bool solicited; /* whether one of those added meanwhile is solicited */
    struct rdmacm_cq *next_added;
    void *owner;
};

/* False without memory. Does not look at `limit`. */
bool rdmacm_cq_push(struct rdmacm_cq *cq, const struct rdmacm_entry *entry);
/* Take the first entries out, at most `most`. */
size_t rdmacm_cq_take(struct rdmacm_cq *cq, struct rdmacm_entry *entries, size_t most);
/* Remove the first `most` completions of a queue pair; how many there were. */
size_t rdmacm_cq_remove(struct rdmacm_cq *cq, uint32_t qp_num, struct rdmacm_entry *removed, size_t most);
void rdmacm_cq_free(struct rdmacm_cq *cq);
/* Whether it has completions. A caller without the mutex may learn it late. */
static inline bool rdmacm_cq_has_any(const struct rdmacm_cq *cq) {
    return __atomic_load_n(&cq->count, __ATOMIC_RELAXED);
}

/* -- routes ----------------------------------------------------------------------------------------------------------- */

enum { RDMACM_CONTROL_SPACE = 160 };

/* How packets to an address are sent. */
struct rdmacm_route {
    bool is_ipv6, is_multicast;
    struct sockaddr_storage address;
    socklen_t address_length;
    _Alignas(struct cmsghdr) uint8_t control[RDMACM_CONTROL_SPACE]; /* room for the segment size is behind it */
    size_t control_length;
    size_t train; /* bytes of a train; 0: none */
};

/* The way to an address of 4 or 16 bytes, without ancillary data; `scope` is the interface of a link-local one. */
void rdmacm_route_init(struct rdmacm_route *route, const uint8_t *remote, bool is_ipv6, uint16_t port, uint32_t scope,
                       size_t train);
/* Add an ancillary message. False where there is no room for it. */
bool rdmacm_route_add(struct rdmacm_route *route, int level, int type, const void *value, size_t length);
static inline bool rdmacm_is_link_local(const uint8_t *address) { /* of IPv6 */
    return address[0] == 0xFE && (address[1] & 0xC0) == 0x80;
}

/* -- connections ----------------------------------------------------------------------------------------------------- */

struct rdmacm_ud_end;

/* Packets that no queue pair of this wire has seen; the names are those of the counters of the wire. */
enum rdmacm_stray {
    RDMACM_SHORT,       /* shorter than any packet */
    RDMACM_STRAY,       /* for no process */
    RDMACM_BACKLOG,     /* as many wait for the owner as may */
    RDMACM_SHORT_TRAIN, /* of packets shorter than any; the names from here on are the multiplexer's */
    RDMACM_UNKNOWN_QP,
    RDMACM_WRONG_ADDRESS,
    RDMACM_WRONG_STATE,
    RDMACM_NO_MEMBER, /* of a group that no queue pair is attached to */
    RDMACM_STRAYS,
    RDMACM_NO_STRAY = RDMACM_STRAYS,
};

/* A queue pair of the owner's, which may have joined the wire. */
struct rdmacm_known {
    uint32_t qp_num;
    struct rdmacm_conn *conn; /* NULL: it has not joined */
    int accepts; /* RDMACM_ACCEPTS_... */
    bool is_ipv6;
    uint8_t remote[16], local[16];
    uint32_t scope; /* of a link-local peer, the interface index; else 0 */
    size_t queued, queued_bytes; /* its datagrams that wait for the owner, or that it processes: later ones wait too */
    uint64_t refused[RDMACM_REFUSALS]; /* since the owner took them last */
    uint64_t *refused_at;      /* where an owner in C has them instead; NULL: above */
    bool is_listed;            /* in rdmacm_wire.refusing, as some were */
    struct rdmacm_known *next; /* there */
};

/* A connection whose peer is known, or a datagram queue pair. */
struct rdmacm_conn {
    struct rdmacm_wire *wire;
    struct rdmacm_queues *queues; /* of its engine */
    struct rdmacm_rc *rc;         /* NULL of a datagram queue pair */
    struct rdmacm_ud_end *ud;     /* NULL of a connection */
    struct rdmacm_cq *send_cq, *recv_cq; /* NULL of an XRC target: each shared receive queue has its own */
    uint32_t qp_num;
    /* Of a connection: packets are accepted from this address and port to that address. */
    uint8_t remote[16], local[16];
    uint16_t remote_port;  /* that the last packet came from, in network order; 0: none came */
    struct rdmacm_flow flow; /* of packets from there */
    uint32_t remote_scope; /* of IPv6, the interface index; else 0 */
    /* Of a connection: the route of outgoing packets. */
    int fd;
    struct rdmacm_route route;
    /* Requests posted here, less those completed here, since the owner took them last. */
    int64_t sends_change, recvs_change;
    struct rdmacm_known *known;
    unsigned events; /* RDMACM_EVENT_...: what the owner has to do */
    bool has_timer;   /* whether the owner will call its timer, at some time */
    bool told_failed; /* whether the owner was told that its engine has failed */
    bool told_send_failed; /* the same of its send queue */
    bool tell_first;  /* whether the owner wants to know of the next packet that is accepted */
    /* Of a connection whose peer was asked: the PSN and the length of the oldest request then, and the answers before. */
    bool has_asked;
    uint32_t asked_psn, asked_length, asked_answers;
    bool in_acks, in_ready, in_events, in_timers;
    struct rdmacm_conn *next_ack, *next_ready, *next_event;
    struct rdmacm_conn *next_timer, *previous_timer;
    void *owner;
};

/* The addresses of a device. Its queue pairs refer to them; the owner has the structure. */
struct rdmacm_addresses {
    uint32_t ifindex; /* of its interface */
    struct rdmacm_address {
        bool is_ipv6;
        uint8_t address[16];
    } *items;
    size_t count;
};

/* A datagram queue pair of a wire. */
struct rdmacm_ud_end {
    struct rdmacm_conn conn;
    struct rdmacm_ud *ud;
    int fds[2]; /* packets leave from this socket of IPv4, and that of IPv6; -1: none */
    const struct rdmacm_addresses *addresses; /* that packets are accepted at */
};

/* Whether a connection has failed because long packets do not arrive: the peer has answered short ones meanwhile, if the
 * wire asks peers. */
bool rdmacm_wire_has_hole(const struct rdmacm_conn *conn);

/* -- the wire -------------------------------------------------------------------------------------------------------- */

/* A datagram that the core has not processed, or the rest of one. */
struct rdmacm_arrival {
    struct rdmacm_arrival *next;
    struct sockaddr_storage source;
    uint8_t local[16];
    size_t local_length; /* bytes; 0: not known */
    int traffic_class, hop_limit; /* -1: not known */
    uint32_t qp_num; /* of its first packet */
    bool is_others;  /* whether that is no queue pair of this wire */
    struct rdmacm_group *group; /* whose packet it is; NULL: of no multicast group */
    uint32_t ifindex;           /* where that is; 0: none */
    size_t segment, size;
    uint8_t data[];
};

enum {
    RDMACM_LONGEST_DATAGRAM = 65536,
    RDMACM_ERRNO_COUNT = 160,
    /* Datagrams and bytes that may wait for the owner, of one queue pair and of all. More are lost, so that the packets
     * of others are read. */
    RDMACM_QUEUE_DATAGRAMS = 1024,
    RDMACM_QUEUE_BYTES = 4 << 20,
    RDMACM_ALL_DATAGRAMS = 4 * RDMACM_QUEUE_DATAGRAMS,
    RDMACM_ALL_BYTES = 4 * RDMACM_QUEUE_BYTES,
    /* Those that the owner takes at a time. */
    RDMACM_MOST_ARRIVALS = 256,
};

/* A datagram that was read, by its ancillary data. */
struct rdmacm_received {
    struct sockaddr_storage source;
    uint8_t local[16];
    size_t local_length; /* bytes; 0: not known */
    int traffic_class, hop_limit; /* -1: not known */
    uint32_t ifindex;             /* of the interface where it has arrived */
    size_t segment, size;
};

/* The address that a datagram comes from, as long as that where it has arrived; NULL: they are of two families, or not
 * known. */
const uint8_t *rdmacm_source_of(const struct rdmacm_received *from);
/* Whether it comes from an address and has arrived at another, of `length` bytes each. */
bool rdmacm_is_between(const struct rdmacm_received *from, size_t length, const uint8_t *remote, const uint8_t *local);

/* What an owner in C puts between a wire and its sockets. */
struct rdmacm_between {
    /* A datagram of `out` is about to leave. Whether it was dealt with: the wire does not send it then. */
    bool (*sends)(struct rdmacm_wire *wire, int fd, const struct rdmacm_route *route,
                  const struct rdmacm_datagram *datagram);
    /* A datagram was read to the buffer. */
    void (*has_read)(struct rdmacm_wire *wire, const struct rdmacm_received *from);
};

/* A multicast group on an interface: it has a socket of its own. */
struct rdmacm_group {
    struct rdmacm_group *next;
    bool is_ipv6;
    uint8_t address[16];
    uint32_t ifindex;
    uint32_t *members; /* the numbers of the queue pairs that are attached to it */
    size_t members_count;
    struct rdmacm_known waiting; /* its packets that wait for the owner */
};

/* What a wire counts, since the owner took it last. An owner in C may have it in its own memory, which others see. */
struct rdmacm_tally {
    /* What has passed the sockets, packets of trains one by one, and what the system has refused to send. */
    struct rdmacm_traffic {
        uint64_t sent_packets, sent_bytes, received_packets, received_bytes, unsent_packets;
        uint64_t sent_multicast, received_multicast; /* those of these packets that are of a group */
    } traffic;
    uint64_t strays[RDMACM_STRAYS]; /* packets that nobody needs to know of: they do not make the owner look */
    struct rdmacm_wire_counts {
        uint64_t lost[RDMACM_ERRNO_COUNT]; /* packets and trains, by errno */
        uint64_t no_room, trains_cut, dropped;
    } counts;
};

struct rdmacm_wire {
    struct rdmacm_source {
        int fd;                     /* of a UDP socket */
        struct rdmacm_group *group; /* NULL: packets of queue pairs arrive there */
    } *sources;
    size_t sources_count, sources_capacity;
    struct rdmacm_group *groups;
    int recent;  /* the descriptor where the last packet arrived; -1: none */
    int poll_fd; /* an epoll descriptor of all descriptors that the owner reads */
    bool is_enabled;     /* false: every packet is the owner's */
    bool asks_peers; /* whether a peer that has acknowledged nothing in time is asked with a short packet */
    bool may_defer_acks; /* whether somebody but `service` sends them soon if the caller does not come back */
    uint64_t deferrals;  /* how often one was deferred for that, or would have been if it were allowed */
    _Atomic(uint64_t) calls; /* of those who make progress */
    uint64_t few_calls; /* so many of them, from one packet to the next, do not keep the thread from serving */
    uint64_t taken; /* datagrams that the core has processed, or the first packets of them */
    unsigned busy_calls;
    unsigned polls; /* of callers */
    _Atomic(unsigned) empty_polls, yield_interval; /* polls in vain since the last yield; how many there are between two */

    struct rdmacm_table known; /* queue pairs by number: of struct rdmacm_known */
    size_t conns_count; /* those that have joined */
    bool shares_port;   /* whether other processes have other slots */
    uint8_t own_slots[RDMACM_MAX_SLOT / 8 + 1]; /* a bit for each */

    struct rdmacm_conn *acks, *ready, *events; /* lists */
    struct rdmacm_conn *timers; /* connections that had a deadline when the list was last read, or later */
    double timers_due;          /* no deadline of these is before it */
    struct rdmacm_cq *added;
    struct rdmacm_pin *finished; /* pins of requests that make no completion */
    struct rdmacm_arrival *arrivals, **arrivals_end;
    size_t arrivals_count, arrivals_bytes;
    struct rdmacm_arrival *processing; /* those that the owner has taken, and may not have processed yet */
    struct rdmacm_known others; /* what waits for no queue pair of this wire */
    bool has_added; /* whether a completion was added since the owner took the last one */

    struct rdmacm_service *service; /* the thread that serves peers; NULL: none */
    /* The thread calls this, with the mutex, where the owner has something to do; NULL: it signals. */
    void (*settle)(struct rdmacm_wire *wire);
    const struct rdmacm_between *between; /* NULL: nothing */
    const struct rdmacm_cq *polled; /* the queue whose poll reads packets; NULL: something else reads them */
    /* How datagrams are received for queues that are not polled: their program may have freed the memory. NULL: it is
     * there as long as they are posted. */
    rdmacm_write *write;

    struct rdmacm_tally *tally, own_tally; /* the former is the latter, or the owner's */
    bool has_counts;                       /* whether one of `counts` is not 0 */
    struct rdmacm_known *refusing;         /* queue pairs that have refused some */

    uint8_t buffer[RDMACM_LONGEST_DATAGRAM];
    struct rdmacm_out out;
};

/* A wire without sockets; NULL without memory. */
struct rdmacm_wire *rdmacm_wire_new(void);
/* The owner has taken everything out. */
void rdmacm_wire_free(struct rdmacm_wire *wire);
bool rdmacm_wire_add_source(struct rdmacm_wire *wire, int fd, struct rdmacm_group *group);
/* Read the socket of a group at an address of 4 or 16 bytes. False without memory. */
bool rdmacm_wire_add_group(struct rdmacm_wire *wire, int fd, const uint8_t *address, bool is_ipv6, uint32_t ifindex);
/* Forget the group of a socket, before that is closed. */
void rdmacm_wire_remove_group(struct rdmacm_wire *wire, int fd);
void rdmacm_wire_remove_groups(struct rdmacm_wire *wire);
/* NULL: there is none. */
struct rdmacm_group *rdmacm_wire_find_group(const struct rdmacm_wire *wire, const uint8_t *address, bool is_ipv6,
                                            uint32_t ifindex);

/* The queue pair with a number; NULL: there is none. */
struct rdmacm_known *rdmacm_wire_find(const struct rdmacm_wire *wire, uint32_t qp_num);
/* The same, new if there is none; it accepts the packets of every address then. NULL without memory. */
struct rdmacm_known *rdmacm_wire_know(struct rdmacm_wire *wire, uint32_t qp_num);
void rdmacm_wire_forget(struct rdmacm_wire *wire, uint32_t qp_num);
void rdmacm_wire_forget_all(struct rdmacm_wire *wire);

/* False without memory, or for a number that has joined. */
bool rdmacm_wire_attach(struct rdmacm_wire *wire, struct rdmacm_conn *conn);
void rdmacm_wire_detach(struct rdmacm_conn *conn);

/* Seconds of CLOCK_MONOTONIC. */
double rdmacm_now(void);

/* Read datagrams of a socket of the wire, at most a batch, process them and send what follows. Return how many there
 * were. It ends with the `most_left`th that is left to the owner. */
size_t rdmacm_wire_receive(struct rdmacm_wire *wire, int fd, size_t most_left);
enum { RDMACM_POLLS_PER_YIELD = 4 };

enum rdmacm_polled {
    RDMACM_POLLED_NOTHING,
    RDMACM_POLLED,
    RDMACM_POLLED_OTHER, /* another descriptor of `poll_fd` is ready, or a socket has an error */
};

/* Make progress for a caller that polls a completion queue: read a socket, send what follows. */
enum rdmacm_polled rdmacm_wire_poll(struct rdmacm_wire *wire, const struct rdmacm_cq *queue, double now);
/* It has found nothing: yield the processor now and then. Without the mutex. */
void rdmacm_wire_yield(struct rdmacm_wire *wire);
/* The ACKs that wait: send them. */
void rdmacm_wire_acknowledge(struct rdmacm_wire *wire, double now);
/* The same, unless the caller has a result and they may be deferred. */
void rdmacm_wire_end_turn(struct rdmacm_wire *wire, bool has_result, double now);
/* A connection may have a deadline: both the owner and the service thread look at it in time. */
void rdmacm_wire_arm_timer(struct rdmacm_conn *conn);
/* Send up to `limit` packets of a connection; return how many. They leave under the mutex, so that those of another thread
 * do not overtake them. */
size_t rdmacm_wire_transmit(struct rdmacm_conn *conn, size_t limit, double now);

/* Let connections retransmit whose deadline has come: rdmacm_wire_take_turns() has to follow. */
void rdmacm_wire_call_timers(struct rdmacm_wire *wire, double now);
/* Send what connections have left over. */
void rdmacm_wire_take_turns(struct rdmacm_wire *wire, double now);
/* Send what was just posted, and the ACKs that wait. */
void rdmacm_wire_posted(struct rdmacm_conn *conn, double now);
/* Take the arrivals to process them, oldest first. Until rdmacm_wire_end_arrivals() later packets of their connections
 * wait behind them. NULL: there are none. */
struct rdmacm_arrival *rdmacm_wire_take_arrivals(struct rdmacm_wire *wire);
/* Those that were taken are processed. */
void rdmacm_wire_end_arrivals(struct rdmacm_wire *wire);
/* The owner has read packets of a connection itself: until rdmacm_wire_end_arrivals() later ones wait. False without
 * memory. */
bool rdmacm_wire_claim(struct rdmacm_conn *conn);
/* Drop all. */
void rdmacm_wire_clear_arrivals(struct rdmacm_wire *wire);
/* Whether packets were dropped that the owner has not counted. */
bool rdmacm_wire_has_strays(const struct rdmacm_wire *wire);
/* Whether the owner has something to do. */
bool rdmacm_wire_needs_owner(const struct rdmacm_wire *wire);

/* -- for the files of this layer ------------------------------------------------------------------------------------- */

/* Send a datagram of `out`; what the system refuses is counted. */
void rdmacm_wire_send(struct rdmacm_wire *wire, int fd, struct rdmacm_route *route,
                      const struct rdmacm_datagram *datagram);
/* Copy `length` bytes of a datagram of `out` from byte `at` on. */
void rdmacm_wire_copy(const struct rdmacm_out *out, const struct rdmacm_datagram *datagram, size_t at, size_t length,
                      uint8_t *to);
/* Copy the packet at byte `at` of a datagram of `out`, as one that is sent alone; its bytes, at most
 * RDMACM_LONGEST_PACKET. 0: there is no packet of such a length. */
size_t rdmacm_wire_copy_packet(const struct rdmacm_out *out, const struct rdmacm_datagram *datagram, bool is_ipv6,
                               size_t at, uint8_t *packet);
/* Packets of a datagram. */
size_t rdmacm_wire_packets_of(const struct rdmacm_datagram *datagram);
/* Count packets that were sent. */
void rdmacm_wire_count_sent(struct rdmacm_wire *wire, const struct rdmacm_route *route, size_t packets, size_t bytes);
/* Count a packet or train that was not sent or read, by its errno. */
void rdmacm_wire_count_lost(struct rdmacm_wire *wire, int code);
/* Pass on what the engine of a queue pair has to say. */
void rdmacm_wire_see_engine(struct rdmacm_conn *conn);
void rdmacm_wire_list_event(struct rdmacm_conn *conn, unsigned event);
/* Count what the engine of a queue pair has refused as the wire does. */
void rdmacm_wire_count_refused(struct rdmacm_conn *conn, uint32_t *refused);
/* Whether no more datagrams of a queue pair may wait for the owner. */
bool rdmacm_wire_is_full(const struct rdmacm_wire *wire, const struct rdmacm_known *known);

enum rdmacm_verdict {
    RDMACM_KEPT,    /* a queue pair may accept it, or another process */
    RDMACM_REFUSED, /* its queue pair does not, and has counted it */
    RDMACM_NOBODYS, /* it has reached no queue pair, and the wire has counted it if it `is_first` */
};

/* Take an item out of the list where it is if its `flag` is set. */
#define RDMACM_UNLIST(first, item, next, flag)                                                                         \
    do {                                                                                                               \
        if ((item)->flag) {                                                                                            \
            __typeof__(item) *place = &(first);                                                                        \
            while (*place != (item))                                                                                   \
                place = &(*place)->next;                                                                               \
            *place = (item)->next;                                                                                     \
            (item)->flag = false;                                                                                      \
        }                                                                                                              \
    } while (0)

/* Judge the packet in the wire's buffer from byte `at` on, which no queue pair of the core has processed. `is_first`: of a
 * train for one queue pair. */
enum rdmacm_verdict rdmacm_wire_judge(struct rdmacm_wire *wire, const struct rdmacm_received *from, size_t at,
                                      size_t size, uint32_t qp_num, bool is_first);
/* The start of the ICRC of packets that come from there; false without addresses. */
bool rdmacm_flow_of(const struct rdmacm_received *from, struct rdmacm_flow *flow);

/* Leave `size` bytes of a datagram, from byte `at` on, to the owner. `group` may be NULL. */
void rdmacm_wire_leave(struct rdmacm_wire *wire, const struct rdmacm_received *from, size_t at, size_t size,
                       uint32_t qp_num, struct rdmacm_group *group);

/* Whether a datagram has arrived at an address of the queue pair's device. */
bool rdmacm_ud_is_own(const struct rdmacm_ud_end *end, const struct rdmacm_received *from);
/* Process packets in the wire's buffer, `size` bytes from byte `at` on, which are for a queue pair that has not failed;
 * return how many were accepted. */
size_t rdmacm_ud_deliver(struct rdmacm_ud_end *end, const struct rdmacm_received *from, size_t at, size_t size);
/* Process a datagram in the wire's buffer that was read from the socket of a group. */
void rdmacm_group_deliver(struct rdmacm_wire *wire, struct rdmacm_group *group, const struct rdmacm_received *from);
/* Send up to `limit` packets; return how many. */
size_t rdmacm_ud_transmit(struct rdmacm_ud_end *end, size_t limit);

/* -- service --------------------------------------------------------------------------------------------------------- */

/* Start a thread that serves the peers of a wire while `calls` stands still. Where the owner has something to do it
 * makes `signal_fd` readable, an eventfd(2). False if the system refuses; then nothing has changed. */
bool rdmacm_service_start(struct rdmacm_wire *wire, int signal_fd);
/* End the thread, and wait for its end. The caller does not hold the mutex. */
void rdmacm_service_stop(struct rdmacm_wire *wire);
/* There is a connection, or another socket. */
void rdmacm_service_wake(struct rdmacm_wire *wire);
/* There is something to do at `when`, in seconds: wait no longer. 0: a caller leaves ACKs or packets to send, so look in
 * a moment whether it comes back. */
void rdmacm_service_look_by(struct rdmacm_wire *wire, double when);
/* The owner has taken what there was to do: signal again. */
void rdmacm_service_clear_signal(struct rdmacm_wire *wire);

#endif
