/* The datagram protocol of rsocket(7), without system calls: rs_peers.h. */
#include "rs_bytes.h"
#include "rs_peers.h"

#include <stdlib.h>
#include <string.h>

enum { TAG = 0x55555555, NUMBER_MASK = 0xFFFFFF };

/* After so long without anything of a known peer, a datagram goes through UDP, in seconds. */
static const double confirm_time = 10;

/* -- headers --------------------------------------------------------------------------------------------------------- */

static size_t address_length(unsigned version) { return version == 4 ? 4 : 16; }

size_t rs_service_length(unsigned version) { return 12 + address_length(version); }

size_t rs_source_length(unsigned version) { return version == 4 ? 8 : RS_MOST_SOURCE_HEADER; }

size_t rs_pack_service(uint8_t *bytes, enum rs_service operation, uint32_t qpn, const struct rs_peer_key *own) {
    size_t length = rs_service_length(own->version);
    put32(bytes, TAG);
    bytes[4] = (uint8_t)own->version;
    bytes[5] = (uint8_t)operation;
    bytes[6] = (uint8_t)length;
    bytes[7] = 0;
    put32(bytes + 8, qpn & NUMBER_MASK);
    memcpy(bytes + 12, own->address, address_length(own->version));
    return length;
}

bool rs_unpack_service(const uint8_t *bytes, size_t length, unsigned version, enum rs_service *operation, uint32_t *qpn) {
    size_t header = rs_service_length(version);
    if (length < header || get32(bytes) != TAG || bytes[4] != version || bytes[6] != header)
        return false;
    if (bytes[5] != RS_SERVICE_DATA && bytes[5] != RS_SERVICE_CONTROL)
        return false;
    *operation = bytes[5];
    *qpn = get32(bytes + 8) & NUMBER_MASK;
    return true;
}

size_t rs_pack_source(uint8_t *bytes, const struct rs_peer_key *own, uint32_t flow) {
    size_t length = rs_source_length(own->version), size = address_length(own->version);
    bytes[0] = (uint8_t)own->version;
    bytes[1] = (uint8_t)length;
    put16(bytes + 2, own->port);
    if (own->version == 6)
        put32(bytes + 4, flow);
    memcpy(bytes + length - size, own->address, size);
    return length;
}

bool rs_unpack_source(const uint8_t *bytes, size_t length, unsigned version, struct rs_peer_key *source, uint32_t *flow) {
    size_t header = rs_source_length(version), size = address_length(version);
    if (length < header || bytes[0] != version || bytes[1] != header)
        return false;
    *source = (struct rs_peer_key){.port = get16(bytes + 2), .version = (uint16_t)version};
    memcpy(source->address, bytes + header - size, size);
    *flow = version == 6 ? get32(bytes + 4) : 0;
    return true;
}

/* -- states ---------------------------------------------------------------------------------------------------------- */

/* The next state plus 1; 0: the trigger changes nothing. To RESOLVING, the address is resolved. */
#define TO(state) (RS_PEER_##state + 1)
static const uint8_t transitions[RS_PEER_STATES][RS_PEER_TRIGGERS] = {
    [RS_PEER_UNKNOWN] = {[RS_PEER_SEND] = TO(ASKED), [RS_PEER_NUMBER] = TO(RESOLVING)},
    [RS_PEER_ASKED] = {[RS_PEER_NUMBER] = TO(RESOLVING)},
    [RS_PEER_RESOLVING] = {[RS_PEER_RESOLVED] = TO(KNOWN), [RS_PEER_UNREACHABLE] = TO(ASKED)},
    [RS_PEER_KNOWN] = {[RS_PEER_NUMBER] = TO(RESOLVING), [RS_PEER_UNREACHABLE] = TO(ASKED)},
};

/* Whether the address is to be resolved. */
static bool change(struct rs_peers *peers, struct rs_peer *peer, enum rs_peer_trigger trigger) {
    uint8_t to = transitions[peer->state][trigger];
    if (!to)
        return false;
    peer->state = to - 1;
    if (peer->state != RS_PEER_RESOLVING)
        return false;
    if (peers->resolving >= RS_MOST_RESOLVING) {
        peer->state = RS_PEER_ASKED; /* the next datagram of the peer tries again */
        return false;
    }
    peers->resolving++;
    return true;
}

bool rs_peer_send(struct rs_peers *peers, struct rs_peer *peer, double now) {
    if (peer->state != RS_PEER_KNOWN) {
        change(peers, peer, RS_PEER_SEND);
        return false;
    }
    if (now - peer->heard > confirm_time) {
        peer->heard = now;
        return false;
    }
    return true;
}

bool rs_peer_numbered(struct rs_peers *peers, struct rs_peer *peer, uint32_t qpn, double now) {
    peer->heard = now;
    if (peer->state == RS_PEER_KNOWN && peer->qpn == qpn)
        return false;
    peer->qpn = qpn;
    return change(peers, peer, RS_PEER_NUMBER);
}

void rs_peer_resolved(struct rs_peers *peers, struct rs_peer *peer, bool is_reachable) {
    peers->resolving -= peer->state == RS_PEER_RESOLVING;
    change(peers, peer, is_reachable ? RS_PEER_RESOLVED : RS_PEER_UNREACHABLE);
}

/* -- the table ------------------------------------------------------------------------------------------------------- */

static struct rs_peer **bucket_of(struct rs_peers *peers, const struct rs_peer_key *key) {
    uint32_t hash = 2166136261u; /* FNV */
    const uint8_t *bytes = (const uint8_t *)key;
    for (size_t i = 0; i < sizeof *key; i++)
        hash = (hash ^ bytes[i]) * 16777619u;
    return &peers->buckets[(hash ^ hash >> 16) % RS_PEER_BUCKETS];
}

static void unlink_use(struct rs_peers *peers, struct rs_peer *peer) {
    *(peer->newer ? &peer->newer->older : &peers->newest) = peer->older;
    *(peer->older ? &peer->older->newer : &peers->oldest) = peer->newer;
}

static void link_use(struct rs_peers *peers, struct rs_peer *peer) {
    peer->newer = NULL;
    peer->older = peers->newest;
    *(peer->older ? &peer->older->newer : &peers->oldest) = peer;
    peers->newest = peer;
}

struct rs_peer *rs_peers_find(struct rs_peers *peers, const struct rs_peer_key *key) {
    struct rs_peer *found = *bucket_of(peers, key);
    while (found && memcmp(&found->key, key, sizeof *key))
        found = found->next;
    return found;
}

static void drop(struct rs_peers *peers, struct rs_peer *peer) {
    struct rs_peer **at = bucket_of(peers, &peer->key);
    while (*at != peer)
        at = &(*at)->next;
    *at = peer->next;
    unlink_use(peers, peer);
    peers->count--;
    peers->forget(peers->owner, peer);
    free(peer);
}

struct rs_peer *rs_peers_use(struct rs_peers *peers, const struct rs_peer_key *key) {
    struct rs_peer *peer = rs_peers_find(peers, key);
    if (peer) {
        unlink_use(peers, peer);
        link_use(peers, peer);
        return peer;
    }
    peer = calloc(1, sizeof *peer);
    if (!peer)
        return NULL;
    if (peers->count >= RS_MOST_PEERS) {
        struct rs_peer *oldest = peers->oldest; /* fewer than all are being resolved */
        while (oldest->state == RS_PEER_RESOLVING)
            oldest = oldest->newer;
        drop(peers, oldest);
    }
    struct rs_peer **bucket = bucket_of(peers, key);
    peer->key = *key;
    peer->next = *bucket;
    *bucket = peer;
    peers->count++;
    link_use(peers, peer);
    return peer;
}

void rs_peers_free(struct rs_peers *peers) {
    while (peers->oldest)
        drop(peers, peers->oldest);
}
