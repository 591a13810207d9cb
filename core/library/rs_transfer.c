/* rsocket(7): sending and receiving, and memory that the peer writes by its offset. */
#include "rs_datagram.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>

/* `code`: 0 or an errno, which counts where nothing was moved. */
static ssize_t done(struct rs_socket *rs, size_t moved, int code) {
    rs_leave(rs);
    return moved || !code ? (ssize_t)moved : fail(code);
}

/* -- receiving ------------------------------------------------------------------------------------------------------- */

/* Copy what there is after the first `skip` bytes into vectors; how many bytes. */
static size_t scatter(const struct rs_socket *rs, const struct iovec *vectors, size_t count, size_t skip, size_t from) {
    size_t moved = 0;
    for (size_t i = 0; i < count; i++) {
        size_t size = vectors[i].iov_len;
        if (skip >= size) {
            skip -= size;
            continue;
        }
        uint8_t *to = (uint8_t *)vectors[i].iov_base + skip;
        size_t part = rs_stream_peek(&rs->stream, from + moved, to, size - skip);
        moved += part;
        if (part < size - skip)
            break;
        skip = 0;
    }
    return moved;
}

static size_t total_of(const struct iovec *vectors, size_t count) {
    size_t total = 0;
    for (size_t i = 0; i < count; i++)
        total += vectors[i].iov_len;
    return total;
}

/* Nothing arrives any more: of what is no error, the end of the stream. */
static int end_of(const struct rs_socket *rs) { return rs->stream.state == RS_FAILED ? ECONNRESET : 0; }

/* `length` is minus an errno, or what a call on a datagram socket returns. */
static ssize_t datagram_done(struct rs_socket *rs, ssize_t length) {
    rs_leave(rs);
    return length < 0 ? fail((int)-length) : length;
}

/* `message` is what is filled of a datagram socket. */
static ssize_t receive(int fd, struct msghdr *message, int flags) {
    struct rs_socket *rs = rs_enter(fd);
    const struct iovec *vectors = message->msg_iov;
    size_t count = message->msg_iovlen;
    size_t total = total_of(vectors, count), moved = 0;
    bool waits_for_all = flags & MSG_WAITALL, peeks = flags & MSG_PEEK;
    int code;
    if (!rs)
        return -1;
    if (rs->datagram)
        return datagram_done(rs, rs_datagram_receive(rs, message, flags));
    message->msg_namelen = 0;
    message->msg_controllen = 0;
    message->msg_flags = 0;
    if (flags & MSG_OOB)
        return done(rs, 0, EOPNOTSUPP);
    if (rs->phase != RS_HAS_STREAM && rs->phase != RS_CONNECTING)
        return done(rs, 0, ENOTCONN);
    double deadline = rs_deadline(&rs->options.receive_timeout);
    do {
        code = total ? rs_wait(rs, rs_is_readable, !rs_is_patient(rs, flags), deadline) : 0;
        if (!code && rs->phase != RS_HAS_STREAM)
            code = ENOTCONN;
        if (code || !total)
            break;
        size_t part = scatter(rs, vectors, count, moved, 0);
        if (!part)
            return done(rs, moved, end_of(rs));
        moved += part;
        if (!peeks)
            rs_stream_consume(&rs->stream, part);
    } while (moved < total && waits_for_all && !peeks);
    return done(rs, moved, code);
}

EXPORT ssize_t rrecv(int fd, void *data, size_t size, int flags) {
    struct iovec vector = {.iov_base = data, .iov_len = size};
    return receive(fd, &(struct msghdr){.msg_iov = &vector, .msg_iovlen = 1}, flags);
}

int rgetpeername(int fd, struct sockaddr *address, socklen_t *length);

EXPORT ssize_t rrecvfrom(int fd, void *data, size_t size, int flags, struct sockaddr *address, socklen_t *length) {
    struct iovec vector = {.iov_base = data, .iov_len = size};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_name = length ? address : NULL,
                             .msg_namelen = length ? *length : 0};
    ssize_t moved = receive(fd, &message, flags);
    if (moved < 0 || !message.msg_name)
        return moved;
    if (message.msg_namelen)
        *length = message.msg_namelen;
    else if (moved)
        rgetpeername(fd, address, length);
    return moved;
}

EXPORT ssize_t rrecvmsg(int fd, struct msghdr *message, int flags) { return receive(fd, message, flags); }

EXPORT ssize_t rread(int fd, void *data, size_t size) { return rrecv(fd, data, size, 0); }

EXPORT ssize_t rreadv(int fd, const struct iovec *vectors, int count) {
    if (count < 0)
        return fail(EINVAL);
    return receive(fd, &(struct msghdr){.msg_iov = (void *)(uintptr_t)vectors, .msg_iovlen = (size_t)count}, 0);
}

/* -- sending --------------------------------------------------------------------------------------------------------- */

static int why_not(const struct rs_socket *rs) { return rs->stream.state == RS_FAILED ? ECONNRESET : EPIPE; }

/* Send all, or as much as can be sent without waiting; `code` is why it ended. */
static size_t send_one(struct rs_socket *rs, const uint8_t *data, size_t size, bool waits, int *code) {
    size_t moved = 0;
    double deadline = rs_deadline(&rs->options.send_timeout);
    do {
        *code = size ? rs_wait(rs, rs_is_writable, !waits, deadline) : 0;
        if (!*code && rs->phase != RS_HAS_STREAM)
            *code = ENOTCONN;
        else if (!*code && !rs_stream_may_send(&rs->stream))
            *code = why_not(rs);
        if (!*code)
            moved += rs_stream_write(&rs->stream, data + moved, size - moved);
    } while (!*code && moved < size);
    return moved;
}

/* Whether an address was given counts for a stream, which takes none. */
static ssize_t transmit(int fd, const struct msghdr *message, int flags, bool has_address) {
    struct rs_socket *rs = rs_enter(fd);
    const struct iovec *vectors = message->msg_iov;
    size_t moved = 0, count = message->msg_iovlen;
    int code = 0;
    if (!rs)
        return -1;
    if (rs->datagram)
        return datagram_done(rs, rs_datagram_send(rs, message, flags));
    if (has_address)
        return done(rs, 0, EISCONN);
    if (flags & MSG_OOB)
        return done(rs, 0, EOPNOTSUPP);
    if (rs->phase != RS_HAS_STREAM && rs->phase != RS_CONNECTING)
        return done(rs, 0, ENOTCONN);
    for (size_t i = 0; i < count && !code; i++)
        moved += send_one(rs, vectors[i].iov_base, vectors[i].iov_len, rs_is_patient(rs, flags), &code);
    return done(rs, moved, code);
}

EXPORT ssize_t rsendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *address,
                       socklen_t length) {
    struct iovec vector = {.iov_base = (void *)(uintptr_t)data, .iov_len = size};
    return transmit(fd, &(struct msghdr){.msg_iov = &vector, .msg_iovlen = 1, .msg_name = (void *)(uintptr_t)address,
                                         .msg_namelen = length}, flags, address || length);
}

EXPORT ssize_t rsend(int fd, const void *data, size_t size, int flags) { return rsendto(fd, data, size, flags, NULL, 0); }

EXPORT ssize_t rsendmsg(int fd, const struct msghdr *message, int flags) {
    if (message->msg_control && message->msg_controllen)
        return fail(EOPNOTSUPP);
    return transmit(fd, message, flags, false);
}

EXPORT ssize_t rwrite(int fd, const void *data, size_t size) { return rsend(fd, data, size, 0); }

EXPORT ssize_t rwritev(int fd, const struct iovec *vectors, int count) {
    if (count < 0)
        return fail(EINVAL);
    return transmit(fd, &(struct msghdr){.msg_iov = (void *)(uintptr_t)vectors, .msg_iovlen = (size_t)count}, 0, false);
}

/* -- mapped memory --------------------------------------------------------------------------------------------------- */

/* The first index of the peer's table that is free; -1: none is. */
static int64_t free_index(const struct rs_socket *rs) {
    for (uint32_t index = 0; index < rs->stream.peer.mappings; index++) {
        const struct rs_mapped *each = rs->mapped;
        while (each && each->index != index)
            each = each->next;
        if (!each)
            return index;
    }
    return -1;
}

static int map(struct rs_socket *rs, void *start, size_t size, int protection, off_t *offset) {
    int access = IBV_ACCESS_LOCAL_WRITE | (protection & PROT_WRITE ? IBV_ACCESS_REMOTE_WRITE : 0) |
                 (protection & PROT_READ ? IBV_ACCESS_REMOTE_READ : 0);
    if (rs->datagram)
        return EOPNOTSUPP;
    if (rs->phase != RS_HAS_STREAM || rs->is_gone)
        return ENOTCONN;
    int64_t index = free_index(rs);
    if (index < 0)
        return ENOSPC;
    struct rs_mapped *mapped = calloc(1, sizeof *mapped);
    if (!mapped)
        return ENOMEM;
    mapped->mr = ibv_reg_mr(rs->pd, start, size, access);
    if (*offset < 0)
        *offset = (off_t)(uintptr_t)start;
    struct rs_mapping mapping = {.offset = (uint64_t)*offset, .address = (uintptr_t)start, .length = (uint32_t)size,
                                 .key = mapped->mr ? mapped->mr->rkey : 0};
    if (!mapped->mr || !rs_stream_map(&rs->stream, (uint32_t)index, &mapping)) {
        int code = errno;
        if (mapped->mr)
            ibv_dereg_mr(mapped->mr);
        free(mapped);
        return code;
    }
    mapped->offset = mapping.offset;
    mapped->index = (uint32_t)index;
    mapped->next = rs->mapped;
    rs->mapped = mapped;
    return 0;
}

EXPORT off_t riomap(int fd, void *start, size_t size, int protection, int flags, off_t offset) {
    if (flags || !protection || protection & ~(PROT_READ | PROT_WRITE) || !size || size > UINT32_MAX)
        return fail(EINVAL);
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return -1;
    int code = map(rs, start, size, protection, &offset);
    rs_leave(rs);
    return code ? fail(code) : offset;
}

EXPORT int riounmap(int fd, void *start, size_t size) {
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return -1;
    struct rs_mapped **at = &rs->mapped, *found;
    while (*at && ((*at)->mr->addr != start || (*at)->mr->length != size))
        at = &(*at)->next;
    found = *at;
    if (!found)
        return (int)done(rs, 0, EINVAL);
    *at = found->next;
    rs_stream_map(&rs->stream, found->index, &(struct rs_mapping){0});
    ibv_dereg_mr(found->mr);
    free(found);
    return (int)done(rs, 0, 0);
}

static bool may_write_mapped(struct rs_socket *rs) {
    const struct rs_stream *stream = &rs->stream;
    return rs->phase != RS_CONNECTING &&
           (!rs_stream_may_send(stream) || (rs->is_established && stream->slots &&
                                            stream->put - stream->freed < stream->send_size));
}

EXPORT size_t riowrite(int fd, const void *data, size_t size, off_t offset, int flags) {
    struct rs_socket *rs = rs_enter(fd);
    size_t moved = 0;
    int code = 0;
    if (!rs)
        return (size_t)-1;
    if (rs->phase != RS_HAS_STREAM && rs->phase != RS_CONNECTING)
        return (size_t)done(rs, 0, ENOTCONN);
    while (!code && moved < size) {
        code = rs_wait(rs, may_write_mapped, !rs_is_patient(rs, flags), 0);
        if (!code && rs->phase != RS_HAS_STREAM)
            code = ENOTCONN;
        else if (!code && !rs_stream_may_send(&rs->stream))
            code = why_not(rs);
        else if (!code && !rs_stream_mapping_at(&rs->stream, (uint64_t)offset + moved))
            code = EFAULT;
        if (!code)
            moved += rs_stream_write_mapped(&rs->stream, (const uint8_t *)data + moved, size - moved,
                                            (uint64_t)offset + moved);
    }
    return (size_t)done(rs, moved, code);
}
