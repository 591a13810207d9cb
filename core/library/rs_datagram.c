/* rsocket(7): datagram sockets around the table of peers: a UDP socket, and a queue pair for each local address that
 * datagrams leave from: the bound one, or of a socket that is bound to the wildcard those that routes choose. All with
 * the socket's lock.
 */
#include "rs_datagram.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum {
    AT_ONCE = 32,         /* completions */
    SERVED_AT_ONCE = 64,  /* datagrams of the UDP socket */
    PORT_TRIES = 16,        /* free UDP ports, of which one is to be free as a port of rdma_cm, too */
    HOP_LIMIT = 64,
    MOST_UDP = 1 << 16,
};
static const double linger_time = 1; /* seconds: how long rclose() waits without SO_LINGER */

/* How datagrams get to the queue pair of a peer. */
struct way {
    struct rs_end *end;
    struct ibv_ah *ah;
};

struct rs_resolution {
    struct rs_resolution *next;
    struct rs_end *end;
    struct rdma_cm_id *id;
    struct rs_peer_key key;
};

/* A datagram that the application has not read. */
struct rs_letter {
    struct rs_letter *next;
    struct sockaddr_storage source;
    size_t length;
    uint8_t data[];
};

/* -- addresses ------------------------------------------------------------------------------------------------------- */

static bool is_group(const struct sockaddr_storage *address) {
    return address->ss_family == AF_INET ? IN_MULTICAST(ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr))
                                         : IN6_IS_ADDR_MULTICAST(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

static socklen_t length_of(const struct sockaddr_storage *address) {
    return (socklen_t)cm_address_length((const struct sockaddr *)address);
}

/* Where datagrams to an address go: the wildcard is this host; 0 or an errno. */
static int destination_of(const struct rs_socket *rs, const struct sockaddr *address, socklen_t length,
                          struct sockaddr_storage *to) {
    if (!rs_is_right(rs, address, length))
        return address && length >= sizeof address->sa_family && address->sa_family != rs->domain ? EAFNOSUPPORT : EINVAL;
    *to = (struct sockaddr_storage){0};
    memcpy(to, address, cm_address_length(address));
    if (is_group(to))
        return EOPNOTSUPP;
    if (rs_is_any(to) && to->ss_family == AF_INET)
        ((struct sockaddr_in *)to)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    else if (rs_is_any(to))
        ((struct sockaddr_in6 *)to)->sin6_addr = in6addr_loopback;
    return 0;
}

/* The local address from which datagrams to a peer leave; 0 or an errno. */
static int source_for(const struct rs_datagram *it, const struct sockaddr_storage *to, struct sockaddr_storage *from) {
    *from = it->bound;
    if (!rs_is_any(from))
        return 0;
    uint16_t port = *rs_port_in(from);
    int probe = socket(to->ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0), code = 0;
    socklen_t size = sizeof *from;
    if (probe < 0)
        return errno;
    if (connect(probe, (const struct sockaddr *)to, length_of(to)) ||
        getsockname(probe, (struct sockaddr *)from, &size))
        code = errno;
    close(probe);
    *rs_port_in(from) = port;
    return code;
}

/* -- queue pairs and ways ------------------------------------------------------------------------------------------- */

/* The queue pair of a local address; NULL with errno. */
static struct rs_end *end_of(struct rs_socket *rs, const struct sockaddr_storage *address) {
    struct rs_datagram *it = rs->datagram;
    struct rs_peer_key key = rs_key_of(address);
    for (struct rs_end *each = it->ends; each; each = each->next) {
        struct rs_peer_key own = rs_key_of(&each->address);
        if (!memcmp(own.address, key.address, sizeof key.address))
            return each;
    }
    struct epoll_event event = {.events = EPOLLIN};
    struct rs_end *end = rs_end_open(rs, address);
    if (end && epoll_ctl(it->epoll, EPOLL_CTL_ADD, end->comp_channel->fd, &event)) {
        rs_end_close(end);
        return NULL;
    }
    if (end) {
        end->next = it->ends;
        it->ends = end;
    }
    return end;
}

/* The one from which datagrams to a peer leave. */
static struct rs_end *end_for(struct rs_socket *rs, const struct rs_peer *peer, const struct sockaddr_storage *to) {
    const struct way *way = peer->way;
    struct sockaddr_storage from;
    if (way)
        return way->end;
    int code = source_for(rs->datagram, to, &from);
    if (code) {
        errno = code;
        return NULL;
    }
    return end_of(rs, &from);
}

static void drop_way(struct rs_peer *peer) {
    struct way *way = peer->way;
    if (!way)
        return;
    peer->way = NULL;
    ibv_destroy_ah(way->ah);
    free(way);
}

static void forget(void *owner, struct rs_peer *peer) {
    (void)owner;
    drop_way(peer);
}

static void close_resolution(struct rs_resolution *resolution) {
    if (resolution->id)
        rdma_destroy_id(resolution->id);
    free(resolution);
}

/* The way to a peer is known, or `ah` is NULL: it cannot be found. */
static void resolution_ended(struct rs_socket *rs, struct rs_resolution *resolution, struct ibv_ah *ah) {
    struct rs_datagram *it = rs->datagram;
    struct rs_resolution **at = &it->resolutions;
    while (*at != resolution)
        at = &(*at)->next;
    *at = resolution->next;
    struct rs_peer *peer = rs_peers_find(&it->peers, &resolution->key);
    struct way *way = peer && ah ? malloc(sizeof *way) : NULL;
    if (peer && way) {
        drop_way(peer);
        *way = (struct way){.end = resolution->end, .ah = ah};
        peer->way = way;
    } else if (ah) {
        ibv_destroy_ah(ah);
    }
    if (peer)
        rs_peer_resolved(&it->peers, peer, way);
    close_resolution(resolution);
}

/* A queue pair is of no use any more; the next datagram gets a new one. */
static void fail_end(struct rs_socket *rs, struct rs_end *end, int error) {
    struct rs_datagram *it = rs->datagram;
    struct rs_end **at = &it->ends;
    while (*at != end)
        at = &(*at)->next;
    *at = end->next;
    it->error = error;
    for (struct rs_peer *peer = it->peers.newest; peer; peer = peer->older)
        if (peer->way && ((struct way *)peer->way)->end == end) {
            drop_way(peer);
            rs_peer_resolved(&it->peers, peer, false);
        }
    for (struct rs_resolution *each = it->resolutions, *next; each; each = next) {
        next = each->next;
        if (each->end == end)
            resolution_ended(rs, each, NULL);
    }
    rs_end_close(end);
}

/* -- receiving ------------------------------------------------------------------------------------------------------- */

static bool is_same(const struct rs_peer_key *one, const struct rs_peer_key *other) {
    return !memcmp(one, other, sizeof *one);
}

/* Whether the application gets it. */
static bool deliver(struct rs_socket *rs, const struct rs_peer_key *source, uint32_t flow, const uint8_t *data,
                    size_t length) {
    struct rs_datagram *it = rs->datagram;
    size_t most = (size_t)rs->options.receive_buffer / RS_MOST_DATAGRAM;
    if (it->is_connected && !is_same(source, &it->peer))
        return false;
    if (it->letters_count >= (most ? most : 1)) /* as a queue of receives of the longest datagram has room */
        return false;
    struct rs_letter *letter = malloc(sizeof *letter + length);
    if (!letter)
        return false;
    letter->next = NULL;
    letter->source = rs_address_of(source, flow);
    letter->length = length;
    memcpy(letter->data, data, length);
    *(it->last_letter ? &it->last_letter->next : &it->letters) = letter;
    it->last_letter = letter;
    it->letters_count++;
    it->arrived++;
    return true;
}

static void take_message(struct rs_socket *rs, const struct rs_end *end, const uint8_t *message, size_t length) {
    struct rs_datagram *it = rs->datagram;
    struct rs_peer_key own = rs_key_of(&end->address), source;
    uint32_t flow;
    if (!rs_unpack_source(message, length, own.version, &source, &flow))
        return;
    source.scope = source.version == 6 && rdmacm_is_link_local(source.address) ? own.scope : 0;
    struct rs_peer *peer = rs_peers_find(&it->peers, &source);
    if (peer)
        peer->heard = rdmacm_now();
    size_t header = rs_source_length(own.version);
    deliver(rs, &source, flow, message + header, length - header);
}

/* Whether there was any. */
static bool take_completions(struct rs_socket *rs, struct rs_end *end) {
    struct ibv_wc completions[AT_ONCE];
    int count = verbs_poll_cq(end->cq, AT_ONCE, completions);
    for (int i = 0; i < count; i++) {
        const struct ibv_wc *wc = &completions[i];
        if (wc->status != IBV_WC_SUCCESS) {
            fail_end(rs, end, EIO);
            return true;
        }
        uint32_t slot = (uint32_t)wc->wr_id & ~(uint32_t)RS_IS_SEND;
        if (wc->wr_id & RS_IS_SEND) {
            end->free_slots[end->free_count++] = slot;
            continue;
        }
        if (wc->byte_len > RS_GRH)
            take_message(rs, end, end->memory + (size_t)slot * RS_SLOT + RS_GRH, wc->byte_len - RS_GRH);
        rs_end_post_receive(end, slot);
    }
    if (count < 0)
        fail_end(rs, end, EIO);
    return count;
}

/* -- the UDP socket -------------------------------------------------------------------------------------------------- */

/* 0 or an errno. */
static int send_service(const struct rs_datagram *it, const struct rs_end *end, enum rs_service operation,
                        const struct iovec *vectors, size_t count, const struct sockaddr_storage *to) {
    uint8_t header[RS_MOST_SERVICE_HEADER];
    struct rs_peer_key own = rs_key_of(&end->address);
    struct iovec all[1 + RS_MOST_PIECES] = {
        {.iov_base = header, .iov_len = rs_pack_service(header, operation, end->id->qp->qp_num, &own)}};
    for (size_t i = 0; i < count; i++)
        all[1 + i] = vectors[i];
    struct msghdr message = {.msg_name = (void *)(uintptr_t)to, .msg_namelen = length_of(to), .msg_iov = all,
                             .msg_iovlen = 1 + count};
    return sendmsg(it->udp, &message, MSG_NOSIGNAL) < 0 ? errno : 0;
}

static void resolve(struct rs_socket *rs, struct rs_peer *peer) {
    struct rs_datagram *it = rs->datagram;
    struct sockaddr_storage to = rs_address_of(&peer->key, 0), from;
    struct rs_end *end = source_for(it, &to, &from) ? NULL : end_of(rs, &from);
    struct rs_resolution *resolution = end ? calloc(1, sizeof *resolution) : NULL;
    if (!resolution) {
        rs_peer_resolved(&it->peers, peer, false);
        return;
    }
    resolution->end = end;
    resolution->key = peer->key;
    resolution->next = it->resolutions;
    it->resolutions = resolution;
    from = end->address;
    *rs_port_in(&from) = 0;
    if (rdma_create_id(rs->channel, &resolution->id, resolution, RDMA_PS_UDP) ||
        rdma_resolve_addr(resolution->id, (struct sockaddr *)&from, (struct sockaddr *)&to, RS_RESOLVE_TIMEOUT))
        resolution_ended(rs, resolution, NULL);
}

/* Whether anything has changed by a datagram. */
static bool take_service(struct rs_socket *rs, const struct sockaddr_storage *source, const uint8_t *data, size_t length) {
    struct rs_datagram *it = rs->datagram;
    struct rs_peer_key key = rs_key_of(source);
    enum rs_service operation;
    uint32_t qpn;
    if (!rs_unpack_service(data, length, key.version, &operation, &qpn))
        return false;
    struct rs_peer *peer = rs_peers_use(&it->peers, &key);
    if (!peer)
        return false;
    bool is_new = rs_peer_numbered(&it->peers, peer, qpn, rdmacm_now()), is_read = false;
    if (operation == RS_SERVICE_DATA) {
        size_t header = rs_service_length(key.version);
        is_read = deliver(rs, &key, 0, data + header, length - header);
        const struct rs_end *end = end_for(rs, peer, source);
        if (end)
            send_service(it, end, RS_SERVICE_CONTROL, NULL, 0, source);
    }
    if (is_new)
        resolve(rs, peer);
    return is_new || is_read;
}

/* Whether anything has changed. Datagrams of which nothing comes are no progress, and so keep no call from its end. */
static bool serve(struct rs_socket *rs) {
    struct rs_datagram *it = rs->datagram;
    bool has_changed = false;
    for (int i = 0; i < SERVED_AT_ONCE; i++) {
        struct sockaddr_storage source = {0};
        socklen_t size = sizeof source;
        ssize_t length = recvfrom(it->udp, it->buffer, MOST_UDP, 0, (struct sockaddr *)&source, &size);
        if (length < 0 && (errno == EAGAIN || errno == EBADF))
            break;
        if (length >= 0 && source.ss_family == rs->domain) /* an error is of an earlier datagram, without a receiver */
            has_changed |= take_service(rs, &source, it->buffer, (size_t)length);
    }
    return has_changed;
}

/* -- events ---------------------------------------------------------------------------------------------------------- */

static struct ibv_ah *handle_for(const struct rs_resolution *resolution) {
    const struct rdma_cm_id *id = resolution->id;
    const struct ibv_sa_path_rec *path = id->route.num_paths ? id->route.path_rec : NULL;
    int index = path ? rs_gid_index(id->verbs, id->port_num, &path->sgid) : -1;
    if (index < 0)
        return NULL;
    struct ibv_ah_attr attributes = {
        .dlid = ntohs(path->dlid), .sl = path->sl, .static_rate = path->rate, .is_global = 1, .port_num = id->port_num,
        .grh = {.dgid = path->dgid, .flow_label = ntohl(path->flow_label), .sgid_index = (uint8_t)index,
                .hop_limit = path->hop_limit ? path->hop_limit : HOP_LIMIT, .traffic_class = path->traffic_class}};
    return ibv_create_ah(resolution->end->pd, &attributes);
}

static void take_event(struct rs_socket *rs, enum rdma_cm_event_type type, const struct rdma_cm_id *id) {
    struct rs_datagram *it = rs->datagram;
    for (struct rs_end *each = it->ends; each; each = each->next)
        if (each->id == id) {
            if (type == RDMA_CM_EVENT_DEVICE_REMOVAL)
                fail_end(rs, each, EIO);
            return;
        }
    struct rs_resolution *resolution = it->resolutions;
    while (resolution && resolution->id != id)
        resolution = resolution->next;
    if (!resolution || (type == RDMA_CM_EVENT_ADDR_RESOLVED && !rdma_resolve_route(resolution->id, RS_RESOLVE_TIMEOUT)))
        return;
    resolution_ended(rs, resolution, type == RDMA_CM_EVENT_ROUTE_RESOLVED ? handle_for(resolution) : NULL);
}

/* Whether there was any. */
static bool take_events(struct rs_socket *rs) {
    struct rdma_cm_event *event;
    bool has_any = false;
    while (!rdma_get_cm_event(rs->channel, &event)) {
        enum rdma_cm_event_type type = event->event;
        const struct rdma_cm_id *id = event->id;
        rdma_ack_cm_event(event); /* so that the id may be destroyed */
        take_event(rs, type, id);
        has_any = true;
    }
    if (errno != EAGAIN && !rs->datagram->error) { /* the server has gone */
        rs->datagram->error = ENODEV;
        has_any = true;
    }
    return has_any;
}

bool rs_datagram_progress(struct rs_socket *rs) {
    const struct rs_datagram *it = rs->datagram;
    bool has_done = false;
    if (it->epoll < 0)
        return false;
    for (struct rs_end *each = it->ends, *next; each; each = next) {
        next = each->next;
        has_done |= take_completions(rs, each);
    }
    has_done |= take_events(rs);
    has_done |= serve(rs);
    return has_done;
}

void rs_datagram_arm(struct rs_socket *rs) {
    struct ibv_cq *cq;
    void *context;
    for (struct rs_end *each = rs->datagram->ends; each; each = each->next) {
        while (!ibv_get_cq_event(each->comp_channel, &cq, &context))
            ibv_ack_cq_events(cq, 1);
        verbs_req_notify_cq(each->cq, 0);
    }
}

bool rs_datagram_is_readable(const struct rs_socket *rs) {
    const struct rs_datagram *it = rs->datagram;
    return it->letters || it->error || it->has_shut[SHUT_RD];
}

bool rs_datagram_is_writable(const struct rs_socket *rs) {
    const struct rs_datagram *it = rs->datagram;
    const struct rs_end *each = it->ends;
    while (each && each->free_count)
        each = each->next;
    return !each || it->error || it->has_shut[SHUT_WR];
}

/* -- opening and closing --------------------------------------------------------------------------------------------- */

bool rs_datagram_new(struct rs_socket *rs) {
    struct rs_datagram *it = rs->datagram = calloc(1, sizeof *it);
    if (!it)
        return false;
    it->udp = it->epoll = -1;
    it->peers.forget = forget;
    return true;
}

static int open_udp(const struct rs_socket *rs, const struct sockaddr_storage *address) {
    int on = 1, fd = socket(rs->domain, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if ((rs->options.reuse_address && setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on)) ||
        (rs->domain == AF_INET6 && setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on)) ||
        bind(fd, (const struct sockaddr *)address, length_of(address))) {
        int code = errno;
        close(fd);
        return fail(code);
    }
    return fd;
}

static void close_descriptors(struct rs_datagram *it) {
    if (it->udp >= 0)
        close(it->udp);
    if (it->epoll >= 0)
        close(it->epoll);
    it->udp = it->epoll = -1;
}

static int open_at(struct rs_socket *rs, const struct sockaddr_storage *address) {
    struct rs_datagram *it = rs->datagram;
    struct epoll_event event = {.events = EPOLLIN};
    socklen_t size = sizeof it->bound;
    it->epoll = epoll_create1(EPOLL_CLOEXEC);
    it->udp = open_udp(rs, address);
    it->bound = *address;
    if (it->epoll >= 0 && it->udp >= 0 && !epoll_ctl(it->epoll, EPOLL_CTL_ADD, it->udp, &event) &&
        !getsockname(it->udp, (struct sockaddr *)&it->bound, &size) && (rs_is_any(&it->bound) || end_of(rs, &it->bound)))
        return 0;
    int code = errno;
    close_descriptors(it);
    return code;
}

int rs_datagram_open(struct rs_socket *rs, const struct sockaddr_storage *address) {
    struct rs_datagram *it = rs->datagram;
    struct sockaddr_storage any = {.ss_family = (sa_family_t)rs->domain};
    int code = 0;
    if (it->epoll >= 0)
        return address ? EINVAL : 0;
    if (!address)
        address = &any;
    if (!it->buffer && !(it->buffer = malloc(MOST_UDP)))
        return ENOMEM;
    for (int i = 0; i < PORT_TRIES; i++) {
        code = open_at(rs, address);
        if (code != EADDRINUSE || *rs_port_in((struct sockaddr_storage *)(uintptr_t)address))
            break;
    }
    return code;
}

void rs_datagram_free(struct rs_socket *rs) {
    struct rs_datagram *it = rs->datagram;
    if (!it)
        return;
    while (it->resolutions) {
        struct rs_resolution *resolution = it->resolutions;
        it->resolutions = resolution->next;
        close_resolution(resolution);
    }
    rs_peers_free(&it->peers);
    while (it->ends) {
        struct rs_end *end = it->ends;
        it->ends = end->next;
        rs_end_close(end);
    }
    while (it->letters) {
        struct rs_letter *letter = it->letters;
        it->letters = letter->next;
        free(letter);
    }
    close_descriptors(it);
    free(it->buffer);
    free(it);
    rs->datagram = NULL;
}

static bool is_idle(struct rs_socket *rs) {
    const struct rs_end *each = rs->datagram->ends;
    while (each && each->free_count == each->sends)
        each = each->next;
    return !each;
}

void rs_datagram_finish(struct rs_socket *rs) {
    const struct linger *linger = &rs->options.linger;
    double deadline = rdmacm_now() + (linger->l_onoff ? linger->l_linger : linger_time);
    while (rs_wait(rs, is_idle, false, deadline) == EINTR) {
    }
}

/* -- calls ----------------------------------------------------------------------------------------------------------- */

int rs_datagram_connect(struct rs_socket *rs, const struct sockaddr *address, socklen_t length) {
    struct rs_datagram *it = rs->datagram;
    struct sockaddr_storage to, from;
    int code = destination_of(rs, address, length, &to);
    if (!code)
        code = rs_datagram_open(rs, NULL);
    if (!code)
        code = source_for(it, &to, &from);
    if (code)
        return code;
    it->peer = rs_key_of(&to);
    it->is_connected = true;
    return 0;
}

int rs_datagram_name(const struct rs_socket *rs, bool is_peer, struct sockaddr_storage *name) {
    const struct rs_datagram *it = rs->datagram;
    *name = it->epoll < 0 ? (struct sockaddr_storage){.ss_family = (sa_family_t)rs->domain} : it->bound;
    struct sockaddr_storage peer = rs_address_of(&it->peer, 0);
    if (is_peer)
        *name = peer;
    if (is_peer)
        return it->is_connected ? 0 : ENOTCONN;
    return it->is_connected ? source_for(it, &peer, name) : 0;
}

int rs_datagram_shut(struct rs_socket *rs, int how) {
    struct rs_datagram *it = rs->datagram;
    if (!it->is_connected)
        return ENOTCONN;
    it->has_shut[SHUT_RD] |= how != SHUT_WR;
    it->has_shut[SHUT_WR] |= how != SHUT_RD;
    rs_wake();
    rs_tell(rs, true);
    return 0;
}

int rs_datagram_take_error(struct rs_socket *rs) {
    int error = rs->datagram->error;
    rs->datagram->error = 0;
    return error;
}

size_t rs_datagram_next(const struct rs_socket *rs) { return rs->datagram->letters ? rs->datagram->letters->length : 0; }

static size_t scatter(const struct rs_letter *letter, const struct iovec *vectors, size_t count) {
    size_t at = 0;
    for (size_t i = 0; i < count && at < letter->length; i++) {
        size_t left = letter->length - at, part = vectors[i].iov_len < left ? vectors[i].iov_len : left;
        memcpy(vectors[i].iov_base, letter->data + at, part);
        at += part;
    }
    return at;
}

ssize_t rs_datagram_receive(struct rs_socket *rs, struct msghdr *message, int flags) {
    struct rs_datagram *it = rs->datagram;
    socklen_t room = message->msg_namelen;
    message->msg_namelen = 0;
    message->msg_controllen = 0;
    message->msg_flags = 0;
    if (flags & ~(MSG_DONTWAIT | MSG_NOSIGNAL | MSG_WAITALL | MSG_PEEK | MSG_TRUNC))
        return -EOPNOTSUPP;
    int code = rs_datagram_open(rs, NULL);
    if (!code)
        code = rs_wait(rs, rs_is_readable, !rs_is_patient(rs, flags), rs_deadline(&rs->options.receive_timeout));
    if (!code && it->error)
        code = rs_datagram_take_error(rs);
    if (code || !it->letters)
        return -code; /* or it was shut down */
    struct rs_letter *letter = it->letters;
    size_t moved = scatter(letter, message->msg_iov, message->msg_iovlen);
    ssize_t result = (ssize_t)(flags & MSG_TRUNC ? letter->length : moved);
    if (message->msg_name) {
        message->msg_namelen = length_of(&letter->source);
        memcpy(message->msg_name, &letter->source, message->msg_namelen < room ? message->msg_namelen : room);
    }
    message->msg_flags = moved < letter->length ? MSG_TRUNC : 0;
    if (flags & MSG_PEEK)
        return result;
    it->letters = letter->next;
    it->letters_count--;
    if (!it->letters)
        it->last_letter = NULL;
    free(letter);
    return result;
}

static int try_to_send(struct rs_socket *rs, const struct iovec *vectors, size_t count, size_t size,
                       const struct sockaddr_storage *to) {
    struct rs_datagram *it = rs->datagram;
    struct rs_peer_key key = rs_key_of(to);
    struct rs_peer *peer = rs_peers_use(&it->peers, &key);
    if (it->error)
        return rs_datagram_take_error(rs);
    const struct rs_end *end = peer ? end_for(rs, peer, to) : NULL;
    if (!end)
        return peer ? errno : ENOMEM;
    if (size > end->longest)
        return EMSGSIZE;
    if (rs_peer_send(&it->peers, peer, rdmacm_now()) && peer->way)
        return rs_end_send(((struct way *)peer->way)->end, ((struct way *)peer->way)->ah, peer->qpn, vectors, count);
    int code = send_service(it, end, RS_SERVICE_DATA, vectors, count, to);
    if (code == EAGAIN && rs_is_patient(rs, 0)) { /* the queue pairs may have room: so this is not waited for in rs_wait() */
        struct pollfd writable = {.fd = it->udp, .events = POLLOUT};
        poll(&writable, 1, 1);
    }
    return code;
}

ssize_t rs_datagram_send(struct rs_socket *rs, const struct msghdr *message, int flags) {
    struct rs_datagram *it = rs->datagram;
    struct sockaddr_storage to;
    size_t size = 0;
    int code = 0;
    if (flags & ~(MSG_DONTWAIT | MSG_NOSIGNAL))
        return -EOPNOTSUPP;
    if (message->msg_iovlen > RS_MOST_PIECES)
        return -EMSGSIZE;
    if (message->msg_name)
        code = destination_of(rs, message->msg_name, message->msg_namelen, &to);
    else if (it->is_connected)
        to = rs_address_of(&it->peer, 0);
    else
        code = EDESTADDRREQ;
    if (!code && it->has_shut[SHUT_WR])
        code = EPIPE;
    if (!code)
        code = rs_datagram_open(rs, NULL);
    for (size_t i = 0; i < message->msg_iovlen; i++)
        size += message->msg_iov[i].iov_len;
    double deadline = rs_deadline(&rs->options.send_timeout);
    while (!code) {
        code = try_to_send(rs, message->msg_iov, message->msg_iovlen, size, &to);
        if (code != EAGAIN)
            break;
        code = rs_wait(rs, rs_is_writable, !rs_is_patient(rs, flags), deadline);
        if (!code && (!rs_is_patient(rs, flags) || (deadline && rdmacm_now() >= deadline)))
            code = EAGAIN;
    }
    return code ? -code : (ssize_t)size;
}
