/* Connections of libfabric (FI_EP_MSG of its tcp provider), as a peer of peers.py: from fi_connect() to FI_CONNECTED,
 * then closed. "serve" prints its port and runs until it is terminated; "measure PORT COUNT" prints the figures. */

#include <arpa/inet.h>
#include <netinet/in.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

#include "connections.h"

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_eq *events;
static struct fid_cq *queue;

static void check(const char *what, long result) {
    if (result < 0)
        fail(what, fi_strerror((int)-result));
}

static void open_fabric(const char *port, uint64_t flags) {
    struct fi_info *hints = fi_allocinfo();
    struct fi_eq_attr eq_attr = {.wait_obj = FI_WAIT_UNSPEC};
    struct fi_cq_attr cq_attr = {.size = 64, .format = FI_CQ_FORMAT_CONTEXT};
    hints->ep_attr->type = FI_EP_MSG;
    hints->caps = FI_MSG;
    hints->addr_format = FI_SOCKADDR_IN;
    hints->fabric_attr->prov_name = strdup("tcp");
    check("fi_getinfo", fi_getinfo(FI_VERSION(1, 9), "127.0.0.1", port, flags, hints, &info));
    fi_freeinfo(hints);
    check("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
    check("fi_eq_open", fi_eq_open(fabric, &eq_attr, &events, NULL));
    check("fi_domain", fi_domain(fabric, info, &domain, NULL));
    check("fi_cq_open", fi_cq_open(domain, &cq_attr, &queue, NULL));
}

static struct fid_ep *make_endpoint(struct fi_info *with) {
    struct fid_ep *made;
    check("fi_endpoint", fi_endpoint(domain, with, &made, NULL));
    check("fi_ep_bind", fi_ep_bind(made, &events->fid, 0));
    check("fi_ep_bind", fi_ep_bind(made, &queue->fid, FI_TRANSMIT | FI_RECV));
    check("fi_enable", fi_enable(made));
    return made;
}

/* The next event, and its type. */
static uint32_t next_event(struct fi_eq_cm_entry *entry) {
    uint32_t kind;
    ssize_t got;
    do {
        got = fi_eq_sread(events, &kind, entry, sizeof *entry, 10000, 0);
    } while (got == -FI_EINTR);
    if (got == -FI_EAVAIL) {
        struct fi_eq_err_entry error = {0};
        check("fi_eq_readerr", fi_eq_readerr(events, &error, 0));
        fail("an event", fi_strerror(error.err));
    }
    check("fi_eq_sread", got == -FI_EAGAIN ? -FI_ETIMEDOUT : got);
    return kind;
}

static void serve(void) {
    struct fid_pep *listener;
    struct sockaddr_in address;
    size_t size = sizeof address;
    open_fabric(NULL, FI_SOURCE);
    check("fi_passive_ep", fi_passive_ep(fabric, info, &listener, NULL));
    check("fi_pep_bind", fi_pep_bind(listener, &events->fid, 0));
    check("fi_listen", fi_listen(listener));
    check("fi_getname", fi_getname(&listener->fid, &address, &size));
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        struct fi_eq_cm_entry entry;
        uint32_t kind;
        ssize_t got = fi_eq_sread(events, &kind, &entry, sizeof entry, -1, 0);
        if (got == -FI_EAVAIL) { /* a connection that its client has closed early */
            struct fi_eq_err_entry error = {0};
            fi_eq_readerr(events, &error, 0);
            if (error.fid && error.fid != &listener->fid)
                fi_close(error.fid);
        } else if (got > 0 && kind == FI_CONNREQ) {
            check("fi_accept", fi_accept(make_endpoint(entry.info), NULL, 0));
            fi_freeinfo(entry.info);
        } else if (got > 0 && kind == FI_SHUTDOWN) {
            fi_close(entry.fid);
        }
    }
}

static struct fid_ep *begin(void) {
    struct fid_ep *made = make_endpoint(info);
    check("fi_connect", fi_connect(made, info->dest_addr, NULL, 0));
    return made;
}

static void end(fid_t endpoint) {
    check("fi_shutdown", fi_shutdown((struct fid_ep *)endpoint, 0));
    check("fi_close", fi_close(endpoint));
}

/* The next endpoint that is connected. */
static fid_t connected(void) {
    struct fi_eq_cm_entry entry;
    while (next_event(&entry) != FI_CONNECTED)
        ;
    return entry.fid;
}

static void measure(const char *port, size_t count) {
    double *times = calloc(count, sizeof *times), started;
    open_fabric(port, 0);
    for (size_t i = 0; i < count; i++) {
        started = seconds_now();
        begin();
        end(connected());
        times[i] = seconds_now() - started;
    }
    started = seconds_now();
    for (size_t begun = 0, done = 0; done < count; done++) {
        for (; begun < count && begun - done < AT_ONCE; begun++)
            begin();
        end(connected());
    }
    print_figures(times, count, (double)count / (seconds_now() - started));
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "serve"))
        serve();
    else if (argc == 4 && !strcmp(argv[1], "measure") && atoi(argv[3]) > 0)
        measure(argv[2], (size_t)atoi(argv[3]));
    else
        fail(argv[0], "serve, or measure PORT COUNT");
    return 0;
}
