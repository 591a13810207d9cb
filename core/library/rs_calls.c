/* rsocket(7): making, connecting and closing sockets, and their names. */
#include "rs_datagram.h"

#include <errno.h>
#include <string.h>

/* As `fail`, for what has the socket. */
static int done(struct rs_socket *rs, int code) {
    rs_leave(rs);
    return code ? fail(code) : 0;
}

/* -- making ---------------------------------------------------------------------------------------------------------- */

EXPORT int rsocket(int domain, int type, int protocol) {
    if (domain != AF_INET && domain != AF_INET6)
        return fail(EAFNOSUPPORT);
    int kind = type & ~(SOCK_NONBLOCK | SOCK_CLOEXEC);
    if ((kind != SOCK_STREAM && kind != SOCK_DGRAM) ||
        (protocol && protocol != (kind == SOCK_STREAM ? IPPROTO_TCP : IPPROTO_UDP)))
        return fail(EPROTONOSUPPORT);
    struct rs_socket *rs = rs_new(domain);
    if (!rs)
        return -1;
    rs->is_nonblocking = type & SOCK_NONBLOCK;
    int fd = rs->fd;
    bool is_made = kind == SOCK_DGRAM ? rs_datagram_new(rs) : !rdma_create_id(rs->channel, &rs->id, rs, RDMA_PS_TCP);
    if (is_made && !rs_add(rs))
        return fd;
    rs_release(rs);
    return -1;
}

bool rs_is_right(const struct rs_socket *rs, const struct sockaddr *address, socklen_t length) {
    return address && length >= sizeof address->sa_family && address->sa_family == rs->domain &&
           length >= cm_address_length(address);
}

static int bind_to(struct rs_socket *rs, const struct sockaddr *address) {
    struct sockaddr_storage copy = {0};
    memcpy(&copy, address, cm_address_length(address));
    if (rs->datagram)
        return rs_datagram_open(rs, &copy);
    if (rdma_bind_addr(rs->id, (struct sockaddr *)&copy))
        return errno;
    rs->is_bound = true;
    return 0;
}

EXPORT int rbind(int fd, const struct sockaddr *address, socklen_t length) {
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return -1;
    bool is_usable = rs->phase == RS_IDLE && !rs->is_bound && rs_is_right(rs, address, length);
    return done(rs, is_usable ? bind_to(rs, address) : EINVAL);
}

EXPORT int rlisten(int fd, int backlog) {
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return -1;
    struct sockaddr_storage any = {.ss_family = (sa_family_t)rs->domain};
    int code = 0;
    if (rs->datagram)
        return done(rs, EOPNOTSUPP);
    if (rs->phase == RS_LISTENING)
        return done(rs, 0);
    if (rs->phase != RS_IDLE)
        return done(rs, EINVAL);
    if (!rs->is_bound)
        code = bind_to(rs, (struct sockaddr *)&any);
    if (!code && rdma_listen(rs->id, backlog))
        code = errno;
    if (!code)
        rs->phase = RS_LISTENING;
    return done(rs, code);
}

/* -- names ----------------------------------------------------------------------------------------------------------- */

static void copy_name(const struct sockaddr_storage *from, struct sockaddr *to, socklen_t *length) {
    socklen_t size = (socklen_t)cm_address_length((const struct sockaddr *)from);
    memcpy(to, from, *length < size ? *length : size);
    *length = size;
}

EXPORT int rgetpeername(int fd, struct sockaddr *address, socklen_t *length) {
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return -1;
    struct sockaddr_storage name;
    int code = 0;
    if (rs->datagram)
        code = rs_datagram_name(rs, true, &name);
    else if (rs->phase == RS_HAS_STREAM)
        name = rs->id->route.addr.dst_storage;
    else
        code = ENOTCONN;
    if (!code)
        copy_name(&name, address, length);
    return done(rs, code);
}

EXPORT int rgetsockname(int fd, struct sockaddr *address, socklen_t *length) {
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return -1;
    struct sockaddr_storage name;
    int code = 0;
    if (rs->datagram)
        code = rs_datagram_name(rs, false, &name);
    else
        name = rs->id->route.addr.src_storage;
    name.ss_family = (sa_family_t)rs->domain; /* of one that is not bound */
    if (!code)
        copy_name(&name, address, length);
    return done(rs, code);
}

/* -- connecting ------------------------------------------------------------------------------------------------------ */

EXPORT int raccept(int fd, struct sockaddr *address, socklen_t *length) {
    struct rs_socket *rs = rs_enter(fd), *accepted = NULL;
    if (!rs)
        return -1;
    int code = rs->phase == RS_LISTENING ? 0 : rs->datagram ? EOPNOTSUPP : EINVAL;
    double deadline = rs_deadline(&rs->options.receive_timeout);
    while (!code && !accepted) { /* a request may be refused */
        code = rs_wait(rs, rs_is_readable, rs->is_nonblocking, deadline);
        if (!code)
            accepted = rs_accept(rs, &code);
    }
    rs_leave(rs);
    if (!accepted)
        return fail(code);
    if (address && length)
        copy_name(&accepted->id->route.addr.dst_storage, address, length);
    return accepted->fd;
}

static bool is_decided(struct rs_socket *rs) { return rs->phase != RS_CONNECTING; }

static int start_connecting(struct rs_socket *rs, const struct sockaddr *address, socklen_t length) {
    struct sockaddr_storage copy = {0};
    if (!rs_is_right(rs, address, length))
        return EINVAL;
    memcpy(&copy, address, cm_address_length(address));
    if (rdma_resolve_addr(rs->id, NULL, (struct sockaddr *)&copy, RS_RESOLVE_TIMEOUT))
        return errno;
    rs->phase = RS_CONNECTING;
    return 0;
}

static int connect_to(struct rs_socket *rs, const struct sockaddr *address, socklen_t length) {
    bool is_new = rs->phase == RS_IDLE;
    if (rs->phase == RS_HAS_STREAM)
        return EISCONN;
    if (rs->phase == RS_LISTENING)
        return EINVAL;
    int code = is_new ? start_connecting(rs, address, length) : 0;
    if (!code)
        code = rs_wait(rs, is_decided, rs->is_nonblocking, rs_deadline(&rs->options.send_timeout));
    if (code)
        return code != EAGAIN ? code : is_new ? EINPROGRESS : EALREADY;
    code = rs->phase == RS_ENDED && !rs->error ? ECONNABORTED : rs->error;
    rs->error = 0;
    return code;
}

EXPORT int rconnect(int fd, const struct sockaddr *address, socklen_t length) {
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return -1;
    return done(rs, rs->datagram ? rs_datagram_connect(rs, address, length) : connect_to(rs, address, length));
}

/* -- the end --------------------------------------------------------------------------------------------------------- */

static bool is_settled(struct rs_socket *rs) { return rs->is_established || rs->is_gone; }

static bool has_arrived(struct rs_socket *rs) { return rs->is_gone || rs_stream_is_idle(&rs->stream); }

/* Close a half or both, and wait until everything has arrived, or until a time. */
static int shut(struct rs_socket *rs, enum rs_trigger trigger, double deadline) {
    int code;
    while ((code = rs_wait(rs, is_settled, false, deadline)) == EINTR) {
    }
    if (code)
        return code;
    rs_stream_change(&rs->stream, trigger);
    rs_wake();
    rs_tell(rs, true);
    while ((code = rs_wait(rs, has_arrived, false, deadline)) == EINTR) {
    }
    return code;
}

EXPORT int rshutdown(int fd, int how) {
    static const enum rs_trigger triggers[] = {
        [SHUT_RD] = RS_SHUT_READING, [SHUT_WR] = RS_SHUT_WRITING, [SHUT_RDWR] = RS_SHUT_BOTH};
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return -1;
    if (how < SHUT_RD || how > SHUT_RDWR)
        return done(rs, EINVAL);
    if (rs->datagram)
        return done(rs, rs_datagram_shut(rs, how));
    return done(rs, rs->phase == RS_HAS_STREAM ? shut(rs, triggers[how], 0) : ENOTCONN);
}

EXPORT int rclose(int fd) {
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return rs_epoll_close(fd);
    if (rs_close_number(rs, fd))
        return done(rs, 0);
    const struct linger *linger = &rs->options.linger;
    if (rs->datagram)
        rs_datagram_finish(rs);
    else if (rs->phase == RS_HAS_STREAM && !rs->is_gone && (!linger->l_onoff || linger->l_linger))
        shut(rs, RS_SHUT_BOTH, linger->l_onoff ? rdmacm_now() + linger->l_linger : 0);
    if (!rs->is_closed) { /* by another thread meanwhile */
        rs_end(rs);
        rs_remove(rs);
    }
    return done(rs, 0);
}
