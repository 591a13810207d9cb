/* The library for C programs: libibverbs and librdmacm on the software device, without Python in the process.
 *
 * It is one file under both names. The data path is all here: memory, queues, engines, sockets, completions. What needs
 * the host is asked of the server, `rdmacm run` (protocol.h, control.c): devices, sockets, addresses, connections.
 * docs/run-design.md describes it.
 */
#ifndef RDMACM_LIBRARY_H
#define RDMACM_LIBRARY_H

#include "../wire/rdmacm_wire.h"
#include "abi.h"
#include "protocol.h"

#define EXPORT __attribute__((visibility("default")))

/* -- the server (control.c) -------------------------------------------------------------------------------------------- */

enum { RUN_MOST_FDS = 2 };

/* A request and its reply. */
struct call {
    uint32_t type, channel;
    const void *in; /* the body */
    size_t in_size;
    const void *more; /* bytes behind it */
    size_t more_size;
    int sent_fd; /* a descriptor that goes along; -1: none */
    /* set by control_call() */
    void *out; /* room for the body of the reply */
    size_t out_size; /* bytes of that */
    size_t size; /* bytes of the body of the reply, at most `out_size` */
    int fds[RUN_MOST_FDS]; /* descriptors that came with it, which are the caller's then */
    size_t fds_count;
};

/* Ask the server, and wait for the answer; 0, or what it or the connection has: an errno, or a negative code of
 * getaddrinfo(3). ENOSYS where no server is known, ENOTCONN where it has gone. No cancellation point. */
int control_call(struct call *call);
/* The same without descriptors. */
int control(uint32_t type, uint32_t channel, const void *in, size_t in_size, void *out, size_t out_size);
/* What the server has said to the last connection; zeros before there is one. */
struct run_welcome control_welcome(void);
/* -1 with errno set, or 0. */
int fail(int code);

/* -- devices (device.c) ------------------------------------------------------------------------------------------------ */

/* The context of the device with an index that connections use: opened once, and never closed. NULL with errno. */
struct ibv_context *library_context(uint32_t index);
/* The same by node GUID, in network byte order; for commands whose answer has no index. */
struct ibv_context *library_context_of(uint64_t node_guid);
/* The list of all of these, ended by NULL, for rdma_get_devices(3); free() frees it. */
struct ibv_context **library_contexts(int *count);

#endif
