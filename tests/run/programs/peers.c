/* The headers and the table of datagram sockets, core/library/rs_peers.c, as a library that Python drives. */
#include "rs_peers.c"

/* The peers that were forgotten, the last one's key. */
static void forgets(void *owner, struct rs_peer *peer) { *(struct rs_peer_key *)owner = peer->key; }

struct rs_peers *make(struct rs_peer_key *forgotten) {
    struct rs_peers *peers = calloc(1, sizeof *peers);
    peers->forget = forgets;
    peers->owner = forgotten;
    return peers;
}

void destroy(struct rs_peers *peers) {
    rs_peers_free(peers);
    free(peers);
}

int state_of(struct rs_peers *peers, const struct rs_peer_key *key) {
    const struct rs_peer *peer = rs_peers_find(peers, key);
    return peer ? (int)peer->state : RS_PEER_UNKNOWN;
}

/* The number of the queue pair that a datagram goes to; -1: through UDP. */
int64_t sends(struct rs_peers *peers, const struct rs_peer_key *key, double now) {
    struct rs_peer *peer = rs_peers_use(peers, key);
    return rs_peer_send(peers, peer, now) ? (int64_t)peer->qpn : -1;
}

/* -1: no message of the protocol; else bits: 1, there are data; 2, the address is to be resolved. */
int serves(struct rs_peers *peers, const struct rs_peer_key *key, const uint8_t *data, size_t length, double now) {
    enum rs_service operation;
    uint32_t qpn;
    if (!rs_unpack_service(data, length, key->version, &operation, &qpn))
        return -1;
    return (operation == RS_SERVICE_DATA) | rs_peer_numbered(peers, rs_peers_use(peers, key), qpn, now) << 1;
}

void resolves(struct rs_peers *peers, const struct rs_peer_key *key, bool is_reachable) {
    struct rs_peer *peer = rs_peers_find(peers, key);
    if (peer)
        rs_peer_resolved(peers, peer, is_reachable);
}
