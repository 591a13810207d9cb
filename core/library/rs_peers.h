/* The datagram protocol of rsocket(7): its headers, and what is known of the peers of a socket; without system calls.
 *
 * src/rdmacm/proto/rsocket/headers.py and peers.py have the same in Python, and describe the protocol and the states.
 */
#ifndef RDMACM_RS_PEERS_H
#define RDMACM_RS_PEERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    RS_QKEY = 0x01234567,
    RS_MOST_DATAGRAM = 2048, /* bytes of a message on a queue pair */
    RS_MOST_PEERS = 1024,
    RS_MOST_RESOLVING = 16,
    RS_MOST_SERVICE_HEADER = 28,
    RS_MOST_SOURCE_HEADER = 24,
};

/* The address of a peer; the bytes that a version does not have are 0. */
struct rs_peer_key {
    uint8_t address[16];
    uint32_t scope; /* of a link-local address */
    uint16_t port;
    uint16_t version; /* 4 or 6 */
};

/* -- headers ------------------------------------------------------------------------------------------------------- */

enum rs_service { RS_SERVICE_DATA = 0, RS_SERVICE_CONTROL = 7 };

/* Of a version, 4 or 6: bytes of a header. */
size_t rs_service_length(unsigned version);
size_t rs_source_length(unsigned version);
/* Write the header of a datagram on the UDP socket; how many bytes. */
size_t rs_pack_service(uint8_t *bytes, enum rs_service operation, uint32_t qpn, const struct rs_peer_key *own);
/* Read one from a socket of a version; false: it is none. */
bool rs_unpack_service(const uint8_t *bytes, size_t length, unsigned version, enum rs_service *operation, uint32_t *qpn);
/* Write the header of a message on a queue pair; how many bytes. */
size_t rs_pack_source(uint8_t *bytes, const struct rs_peer_key *own, uint32_t flow);
/* Read one; the scope of the key is not set. False: it is none. */
bool rs_unpack_source(const uint8_t *bytes, size_t length, unsigned version, struct rs_peer_key *source, uint32_t *flow);

/* -- peers --------------------------------------------------------------------------------------------------------- */

enum rs_peer_state { RS_PEER_UNKNOWN, RS_PEER_ASKED, RS_PEER_RESOLVING, RS_PEER_KNOWN, RS_PEER_STATES };
enum rs_peer_trigger { RS_PEER_SEND, RS_PEER_NUMBER, RS_PEER_RESOLVED, RS_PEER_UNREACHABLE, RS_PEER_TRIGGERS };

struct rs_peer {
    struct rs_peer_key key;
    enum rs_peer_state state;
    uint32_t qpn;
    double heard; /* when it was last heard of, or asked */
    void *way;    /* the owner's, once it is resolved */
    struct rs_peer *next; /* in its bucket */
    struct rs_peer *newer, *older;
};

enum { RS_PEER_BUCKETS = 256 };

struct rs_peers {
    struct rs_peer *buckets[RS_PEER_BUCKETS];
    struct rs_peer *newest, *oldest; /* by their use */
    size_t count, resolving;
    void (*forget)(void *owner, struct rs_peer *peer); /* a peer goes that was used the longest time ago */
    void *owner;
};

/* The entry of a peer; NULL: there is none. */
struct rs_peer *rs_peers_find(struct rs_peers *peers, const struct rs_peer_key *key);
/* The same, made if there is none, and the last one used then; NULL: no memory. */
struct rs_peer *rs_peers_use(struct rs_peers *peers, const struct rs_peer_key *key);
void rs_peers_free(struct rs_peers *peers);
/* A datagram is sent: whether it goes to the queue pair, and not through UDP. */
bool rs_peer_send(struct rs_peers *peers, struct rs_peer *peer, double now);
/* Something of it came through UDP, with the number of its queue pair; whether its address is to be resolved. */
bool rs_peer_numbered(struct rs_peers *peers, struct rs_peer *peer, uint32_t qpn, double now);
/* What the resolution has found. */
void rs_peer_resolved(struct rs_peers *peers, struct rs_peer *peer, bool is_reachable);

#endif
