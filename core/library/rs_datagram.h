/* rsocket(7): datagram sockets; all with the socket's lock. */
#ifndef RDMACM_RS_DATAGRAM_H
#define RDMACM_RS_DATAGRAM_H

#include "rs_end.h"

enum { RS_MOST_PIECES = 64 }; /* buffers of a datagram */

struct rs_datagram {
    int udp, epoll; /* -1: not open yet; the epoll tells of datagrams on the UDP socket, and of completions */
    struct sockaddr_storage bound;
    bool is_connected;
    struct rs_peer_key peer; /* of rconnect() */
    bool has_shut[2];        /* SHUT_RD, SHUT_WR */
    int error;               /* of the next call */
    struct rs_end *ends;
    struct rs_resolution *resolutions;
    struct rs_peers peers;
    struct rs_letter *letters, *last_letter;
    size_t letters_count;
    uint64_t arrived; /* datagrams */
    uint8_t *buffer;
};

/* False: no memory. */
bool rs_datagram_new(struct rs_socket *rs);
void rs_datagram_free(struct rs_socket *rs);
/* Bind it to an address; NULL: to any, if it is not bound. 0 or an errno, as the others. */
int rs_datagram_open(struct rs_socket *rs, const struct sockaddr_storage *address);
int rs_datagram_connect(struct rs_socket *rs, const struct sockaddr *address, socklen_t length);
int rs_datagram_name(const struct rs_socket *rs, bool is_peer, struct sockaddr_storage *name);
int rs_datagram_shut(struct rs_socket *rs, int how);
/* Wait until everything has left, for a while. */
void rs_datagram_finish(struct rs_socket *rs);
/* How many bytes, or minus an errno. */
ssize_t rs_datagram_send(struct rs_socket *rs, const struct msghdr *message, int flags);
ssize_t rs_datagram_receive(struct rs_socket *rs, struct msghdr *message, int flags);
/* The length of the next datagram; 0: there is none. */
size_t rs_datagram_next(const struct rs_socket *rs);
int rs_datagram_take_error(struct rs_socket *rs);
bool rs_datagram_progress(struct rs_socket *rs);
/* Have the next completions make the descriptor readable. */
void rs_datagram_arm(struct rs_socket *rs);
bool rs_datagram_is_readable(const struct rs_socket *rs);
bool rs_datagram_is_writable(const struct rs_socket *rs);

#endif
