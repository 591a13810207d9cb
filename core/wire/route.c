/* Datagrams on their way out: one sendmsg(2) for each, or for each packet of a train that the system refuses. */
#include "rdmacm_wire.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <time.h>

#ifndef SOL_UDP
#define SOL_UDP 17
#endif
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif

void rdmacm_route_init(struct rdmacm_route *route, const uint8_t *remote, bool is_ipv6, uint16_t port, uint32_t scope,
                       size_t train) {
    bool is_multicast = is_ipv6 ? remote[0] == 0xFF : remote[0] >> 4 == 0xE;
    *route = (struct rdmacm_route){.is_ipv6 = is_ipv6, .is_multicast = is_multicast, .train = train};
    if (is_ipv6) {
        struct sockaddr_in6 *address = (struct sockaddr_in6 *)&route->address;
        address->sin6_family = AF_INET6;
        address->sin6_port = htons(port);
        address->sin6_scope_id = scope;
        memcpy(&address->sin6_addr, remote, 16);
        route->address_length = sizeof *address;
    } else {
        struct sockaddr_in *address = (struct sockaddr_in *)&route->address;
        address->sin_family = AF_INET;
        address->sin_port = htons(port);
        memcpy(&address->sin_addr, remote, 4);
        route->address_length = sizeof *address;
    }
}

bool rdmacm_route_add(struct rdmacm_route *route, int level, int type, const void *value, size_t length) {
    struct cmsghdr header = {.cmsg_len = CMSG_LEN(length), .cmsg_level = level, .cmsg_type = type};
    size_t space = CMSG_SPACE(length);
    if (route->control_length + space + CMSG_SPACE(sizeof(uint16_t)) > sizeof route->control)
        return false;
    memcpy(route->control + route->control_length, &header, sizeof header);
    memcpy(route->control + route->control_length + CMSG_LEN(0), value, length);
    route->control_length += space;
    return true;
}

/* sendmsg(2), repeated if the error may be that of an earlier packet, which the system reports so; 0 or its errno. */
static int send_message(int fd, const struct msghdr *message) {
    int before = 0;
    for (int i = 0;; i++) {
        if (sendmsg(fd, message, MSG_DONTWAIT) >= 0)
            return 0;
        int code = errno;
        if (code == EINTR)
            continue;
        if (i >= RDMACM_SEND_AGAIN || code == before)
            return code;
        before = code;
        if (code == EAGAIN) {
            struct pollfd room = {.fd = fd, .events = POLLOUT};
            if (poll(&room, 1, RDMACM_SEND_WAIT) > 0 && !(room.revents & POLLOUT)) /* a report, which ends every poll(2) */
                nanosleep(&(struct timespec){.tv_nsec = RDMACM_SEND_WAIT * 1000000}, NULL);
        }
    }
}

void rdmacm_wire_copy(const struct rdmacm_out *out, const struct rdmacm_datagram *datagram, size_t at, size_t length,
                      uint8_t *to) {
    for (size_t i = datagram->first; length && i < datagram->first + datagram->count; i++) {
        const struct iovec *piece = &out->pieces[i];
        if (at >= piece->iov_len) {
            at -= piece->iov_len;
            continue;
        }
        size_t part = piece->iov_len - at < length ? piece->iov_len - at : length;
        memcpy(to, (const uint8_t *)piece->iov_base + at, part);
        to += part, length -= part, at = 0;
    }
}

/* A packet that is sent alone has the IPv4 identification 0. */
size_t rdmacm_wire_copy_packet(const struct rdmacm_out *out, const struct rdmacm_datagram *datagram, bool is_ipv6,
                               size_t at, uint8_t *packet) {
    size_t left = datagram->bytes - at, size = datagram->segment && datagram->segment < left ? datagram->segment : left;
    if (size > RDMACM_LONGEST_PACKET || size < RDMACM_SHORTEST_PACKET)
        return 0;
    rdmacm_wire_copy(out, datagram, at, size, packet);
    if (datagram->segment && !is_ipv6) {
        size_t body = size - RDMACM_ICRC_LENGTH;
        uint32_t crc = rdmacm_crc32(rdmacm_flow_start(out->flow, size, 0), packet, body);
        for (size_t i = 0; i < RDMACM_ICRC_LENGTH; i++)
            packet[body + i] = (uint8_t)(crc >> 8 * i);
    }
    return size;
}

size_t rdmacm_wire_packets_of(const struct rdmacm_datagram *datagram) {
    return datagram->segment ? (datagram->bytes + datagram->segment - 1) / datagram->segment : 1;
}

void rdmacm_wire_count_sent(struct rdmacm_wire *wire, const struct rdmacm_route *route, size_t packets, size_t bytes) {
    wire->tally->traffic.sent_packets += packets;
    wire->tally->traffic.sent_bytes += bytes;
    if (route->is_multicast)
        wire->tally->traffic.sent_multicast += packets;
}

static void count_unsent(struct rdmacm_wire *wire, int code, size_t packets) {
    rdmacm_wire_count_lost(wire, code);
    wire->tally->traffic.unsent_packets += packets;
}

/* Send the packets of a train one by one. */
static bool send_singly(struct rdmacm_wire *wire, int fd, struct rdmacm_route *route,
                        const struct rdmacm_datagram *datagram, struct msghdr *message) {
    uint8_t packet[RDMACM_LONGEST_PACKET];
    struct iovec piece = {.iov_base = packet};
    bool is_sent = true;
    message->msg_iov = &piece;
    message->msg_iovlen = 1;
    message->msg_controllen = route->control_length;
    wire->has_counts = true;
    wire->tally->counts.trains_cut++;
    for (size_t at = 0; at < datagram->bytes; at += datagram->segment) {
        piece.iov_len = rdmacm_wire_copy_packet(&wire->out, datagram, route->is_ipv6, at, packet);
        if (!piece.iov_len)
            return false; /* no train has this */
        int code = send_message(fd, message);
        if (code) {
            count_unsent(wire, code, 1);
            is_sent = false;
        } else {
            rdmacm_wire_count_sent(wire, route, 1, piece.iov_len);
        }
    }
    return is_sent;
}

void rdmacm_wire_send(struct rdmacm_wire *wire, int fd, struct rdmacm_route *route,
                      const struct rdmacm_datagram *datagram) {
    if (wire->between && wire->between->sends(wire, fd, route, datagram))
        return;
    struct msghdr message = {
        .msg_name = &route->address,
        .msg_namelen = route->address_length,
        .msg_iov = &wire->out.pieces[datagram->first],
        .msg_iovlen = datagram->count,
        .msg_control = route->control,
        .msg_controllen = route->control_length,
    };
    if (datagram->segment) {
        struct cmsghdr header = {.cmsg_len = CMSG_LEN(sizeof(uint16_t)), .cmsg_level = SOL_UDP, .cmsg_type = UDP_SEGMENT};
        uint16_t segment = (uint16_t)datagram->segment;
        memcpy(route->control + route->control_length, &header, sizeof header);
        memcpy(route->control + route->control_length + CMSG_LEN(0), &segment, sizeof segment);
        message.msg_controllen += CMSG_SPACE(sizeof(uint16_t));
    }
    int code = send_message(fd, &message);
    if (!code) {
        rdmacm_wire_count_sent(wire, route, rdmacm_wire_packets_of(datagram), datagram->bytes);
        return;
    }
    if (datagram->segment && RDMACM_IS_NO_TRAIN(code)) {
        /* A train that was too long, or packets too long for the path, mean nothing for the next train. */
        bool is_too_long = datagram->bytes > RDMACM_LONGEST_TRAIN ||
                           datagram->bytes > RDMACM_MOST_IN_TRAIN * datagram->segment;
        if (send_singly(wire, fd, route, datagram, &message) && code != EMSGSIZE && !is_too_long)
            route->train = 0;
        return;
    }
    count_unsent(wire, code, rdmacm_wire_packets_of(datagram));
}
