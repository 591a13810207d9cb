/* The stream protocol of rsocket(7): one end of a stream, without system calls and without verbs.
 *
 * The engine is told what the application wants, which immediate data have arrived and how many of its requests have
 * completed. It calls post() for each request that it wants. The memory is its owner's, and registered: a ring that
 * messages are sent from, a ring that the peer writes, and the control memory: the target SGL, then the table of I/O
 * mappings. src/rdmacm/proto/rsocket has the same in Python, and describes the protocol.
 */
#ifndef RDMACM_RS_STREAM_H
#define RDMACM_RS_STREAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    RS_VERSION = 1,
    RS_BIG_ENDIAN = 1, /* flags of connection data */
    RS_MAPPINGS = 2,
    RS_CONNECTION_LENGTH = 40,
    RS_TARGETS = 2,
    RS_TARGET_LENGTH = 16,
    RS_MAPPING_LENGTH = 24,
    RS_CONTROL_SLOTS = 4, /* entries of the send queue that are kept for control messages */
    RS_MOST_MAPPINGS = 127 * 256,
};

enum rs_operation { RS_DATA = 0, RS_SGL = 4, RS_IOMAP = 6, RS_CONTROL = 7 };
enum rs_control { RS_DISCONNECT, RS_KEEPALIVE, RS_SHUTDOWN, RS_NO_CONTROL };

/* As in src/rdmacm/proto/rsocket/states.py. */
enum rs_state { RS_OPEN, RS_SEND_ONLY, RS_RECEIVE_ONLY, RS_CLOSING, RS_CLOSED, RS_FAILED, RS_STATES };
enum rs_trigger {
    RS_SHUT_READING,
    RS_SHUT_WRITING,
    RS_SHUT_BOTH,
    RS_PEER_SHUTDOWN,
    RS_PEER_DISCONNECT,
    RS_DISCONNECT_DONE,
    RS_LOST,
    RS_TRIGGERS
};

/* How a peer has broken the protocol. */
enum rs_fault {
    RS_NO_FAULT,
    RS_MORE_BYTES,    /* than it was given room for */
    RS_MORE_MESSAGES, /* than it had credits for */
    RS_MORE_CREDITS,  /* than it has receives */
    RS_MORE_TARGETS,  /* than the target SGL has entries, before any was used up */
    RS_NO_SUCH_MAPPING,
    RS_UNKNOWN_CONTROL,
    RS_UNKNOWN_OPERATION,
    RS_AFTER_THE_END, /* data after the end of its stream */
};

struct rs_target {
    uint64_t address;
    uint32_t key, length; /* of control memory in connection data: entries of the target SGL */
};

struct rs_mapping {
    uint64_t offset, address;
    uint32_t key, length; /* 0: it was taken back */
};

/* What each end says in its private data. */
struct rs_connection_data {
    uint8_t version, flags;
    uint16_t credits;
    uint32_t mappings;
    struct rs_target control, buffer;
};

void rs_pack_connection(uint8_t *bytes, const struct rs_connection_data *data);
/* False: no connection data of an rsocket that this version understands. */
bool rs_unpack_connection(const uint8_t *bytes, size_t length, struct rs_connection_data *data);
/* The size that a table of I/O mappings has in connection data, which round large ones down. */
uint32_t rs_table_size(uint32_t wanted);
uint8_t rs_own_flags(void);

/* A request: an RDMA WRITE, of pieces of the sending ring or of inline bytes. */
struct rs_work {
    uint64_t remote;
    uint32_t key, immediate;
    bool has_immediate;
    const uint8_t *inlined;
    size_t inlined_length;
    struct rs_piece {
        const uint8_t *start;
        size_t length;
    } pieces[2];
    int count;
};

struct rs_sent {
    uint32_t size; /* bytes of the ring */
    bool is_control, is_disconnect;
};

struct rs_stream {
    enum rs_state state;
    enum rs_fault fault;
    struct rs_connection_data own, peer;
    /* of the owner */
    uint8_t *control, *sending, *receiving;
    size_t send_size, receive_size; /* the latter is even */
    void (*post)(void *owner, const struct rs_work *work);
    void *owner;
    /* sending */
    uint64_t put, freed;        /* bytes put into the ring, and those whose requests have completed */
    uint16_t sent, sent_limit;  /* messages, modulo 2**16 */
    uint32_t slots, control_slots;
    struct rs_sent *outstanding; /* a ring of `capacity` */
    uint32_t capacity, first_outstanding, outstanding_count;
    struct rs_target target, next[RS_TARGETS];
    unsigned next_count, next_entry; /* the entry of the target SGL that is read next */
    enum rs_control waiting;         /* for an entry of the send queue */
    /* receiving */
    uint64_t granted, arrived, taken; /* bytes */
    uint64_t messages, message_limit;
    uint32_t peer_entry; /* of the peer's target SGL, which is written next */
    bool peer_has_finished;
    /* I/O mappings */
    struct rs_mapping *mappings; /* of the peer: own.mappings */
    struct rs_change {
        struct rs_mapping mapping;
        bool is_waiting;
    } *changes; /* of this end: peer.mappings; NULL before the first */
    uint32_t changes_waiting;
};

/* The fields that are the owner's, own and peer are set; no memory is left: false. */
bool rs_stream_init(struct rs_stream *stream, uint32_t send_slots);
void rs_stream_free(struct rs_stream *stream);
/* The connection is established: requests may be posted. */
void rs_stream_start(struct rs_stream *stream);

static inline bool rs_stream_is_connected(const struct rs_stream *stream) { return stream->state < RS_CLOSED; }
static inline bool rs_stream_may_send(const struct rs_stream *stream) { return stream->state <= RS_SEND_ONLY; }
static inline bool rs_stream_may_receive(const struct rs_stream *stream) {
    return stream->state == RS_OPEN || stream->state == RS_RECEIVE_ONLY;
}
static inline size_t rs_stream_unread(const struct rs_stream *stream) {
    return (size_t)(stream->arrived - stream->taken);
}
/* Everything that was sent has arrived. */
static inline bool rs_stream_is_idle(const struct rs_stream *stream) {
    return !stream->outstanding_count && stream->waiting == RS_NO_CONTROL;
}
/* Whether rs_stream_write() takes something. */
bool rs_stream_is_writable(struct rs_stream *stream);
/* Send as much as can be sent now; how many bytes. */
size_t rs_stream_write(struct rs_stream *stream, const uint8_t *data, size_t size);
/* Copy unread bytes after the first `skip`; how many. */
size_t rs_stream_peek(const struct rs_stream *stream, size_t skip, uint8_t *data, size_t size);
/* The application has taken unread bytes. */
void rs_stream_consume(struct rs_stream *stream, size_t size);

void rs_stream_received(struct rs_stream *stream, uint32_t immediate);
/* What is no message of the protocol has arrived. */
void rs_stream_broken(struct rs_stream *stream, enum rs_fault fault);
/* The oldest request has completed. */
void rs_stream_completed(struct rs_stream *stream);
/* One of the first three triggers, or RS_LOST. */
void rs_stream_change(struct rs_stream *stream, enum rs_trigger trigger);
/* Have the peer's device acknowledge an empty WRITE, unless something is outstanding. */
void rs_stream_keepalive(struct rs_stream *stream);

/* Tell the peer an I/O mapping, before any data that are sent later; false: no memory. index < peer.mappings. */
bool rs_stream_map(struct rs_stream *stream, uint32_t index, const struct rs_mapping *mapping);
/* The peer's mapping that contains an offset; NULL: none. */
const struct rs_mapping *rs_stream_mapping_at(const struct rs_stream *stream, uint64_t offset);
/* Write to the peer's mapped memory as much as can be written now; how many bytes. */
size_t rs_stream_write_mapped(struct rs_stream *stream, const uint8_t *data, size_t size, uint64_t offset);

#endif
