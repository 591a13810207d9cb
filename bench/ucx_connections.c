/* Connections of UCX (a listener and endpoints of ucp), as a peer of peers.py: from ucp_ep_create() to the first byte
 * of the server, then closed. "serve" prints its port and runs until it is terminated; "measure PORT COUNT" prints the
 * figures. */

#include <arpa/inet.h>
#include <netinet/in.h>
#include <ucp/api/ucp.h>

#include "connections.h"

#define MOST_IDLE 2000

static ucp_context_h context;
static ucp_worker_h worker;

/* Requests and failed endpoints that the server has not handled yet: it may not do so inside of a callback. */
static ucp_conn_request_h requests[4096];
static ucp_ep_h failed[4096];
static size_t request_count, failed_count;

/* A connection of the client. It stays where it is, because the byte is received there. */
struct connection {
    int is_under_way;
    ucp_ep_h endpoint;
    ucs_status_ptr_t receiving, closing;
    size_t length;
    char byte;
};

static void check(const char *what, ucs_status_t status) {
    if (status != UCS_OK)
        fail(what, ucs_status_string(status));
}

static void open_worker(void) {
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_STREAM | UCP_FEATURE_WAKEUP};
    ucp_worker_params_t single = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                  .thread_mode = UCS_THREAD_MODE_SINGLE};
    check("ucp_init", ucp_init(&params, NULL, &context));
    check("ucp_worker_create", ucp_worker_create(context, &single, &worker));
}

/* Makes progress; sleeps after many calls in vain. */
static void progress(void) {
    static int idle;
    if (ucp_worker_progress(worker))
        idle = 0;
    else if (++idle > MOST_IDLE) {
        ucp_worker_wait(worker);
        idle = 0;
    }
}

/* Whether an operation has ended; its request is freed then. */
static int has_ended(const char *what, ucs_status_ptr_t *request) {
    if (UCS_PTR_IS_ERR(*request))
        fail(what, ucs_status_string(UCS_PTR_STATUS(*request)));
    if (!*request)
        return 1;
    ucs_status_t status = ucp_request_check_status(*request);
    if (status == UCS_INPROGRESS)
        return 0;
    ucp_request_free(*request);
    *request = NULL;
    return 1;
}

static ucs_status_ptr_t begin_close(ucp_ep_h endpoint, unsigned flags) {
    ucp_request_param_t how = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = flags};
    return ucp_ep_close_nbx(endpoint, &how);
}

static void requested(ucp_conn_request_h request, void *unused) {
    (void)unused;
    if (request_count < sizeof requests / sizeof *requests)
        requests[request_count++] = request;
}

static void has_failed(void *unused, ucp_ep_h endpoint, ucs_status_t status) {
    (void)unused, (void)status;
    if (failed_count < sizeof failed / sizeof *failed)
        failed[failed_count++] = endpoint;
}

static void ignore(void *unused, ucp_ep_h endpoint, ucs_status_t status) {
    (void)unused, (void)endpoint, (void)status;
}

static void release(void *request, ucs_status_t status, void *unused) {
    (void)status, (void)unused;
    ucp_request_free(request);
}

/* Accepts a request and sends a byte. */
static void greet(ucp_conn_request_h request) {
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
        .conn_request = request,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = has_failed},
    };
    ucp_request_param_t how = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK, .cb = {.send = release}};
    ucp_ep_h endpoint;
    check("ucp_ep_create", ucp_ep_create(worker, &params, &endpoint));
    ucp_stream_send_nbx(endpoint, "+", 1, &how);
}

static void serve(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    ucp_listener_params_t params = {
        .field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER,
        .sockaddr = {.addr = (struct sockaddr *)&address, .addrlen = sizeof address},
        .conn_handler = {.cb = requested},
    };
    ucp_listener_attr_t attr = {.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR};
    ucp_listener_h listener;
    open_worker();
    check("ucp_listener_create", ucp_listener_create(worker, &params, &listener));
    check("ucp_listener_query", ucp_listener_query(listener, &attr));
    printf("%d\n", ntohs(((struct sockaddr_in *)&attr.sockaddr)->sin_port));
    fflush(stdout);
    for (;;) {
        progress();
        while (request_count)
            greet(requests[--request_count]);
        while (failed_count) {
            ucs_status_ptr_t request = begin_close(failed[--failed_count], UCP_EP_CLOSE_FLAG_FORCE);
            while (!has_ended("ucp_ep_close_nbx", &request))
                progress();
        }
    }
}

static void begin(struct connection *connection, const struct sockaddr_in *address) {
    ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR | UCP_EP_PARAM_FIELD_ERR_HANDLER |
                      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
        .flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER,
        .sockaddr = {.addr = (const struct sockaddr *)address, .addrlen = sizeof *address},
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = ignore},
    };
    ucp_request_param_t how = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_STREAM_RECV_FLAG_WAITALL};
    check("ucp_ep_create", ucp_ep_create(worker, &params, &connection->endpoint));
    connection->receiving =
        ucp_stream_recv_nbx(connection->endpoint, &connection->byte, 1, &connection->length, &how);
    connection->is_under_way = 1;
}

/* Whether a connection is still under way; it is closed after its byte. */
static int goes_on(struct connection *connection) {
    if (connection->endpoint) {
        if (!has_ended("ucp_stream_recv_nbx", &connection->receiving))
            return 1;
        connection->closing = begin_close(connection->endpoint, 0);
        connection->endpoint = NULL;
    }
    connection->is_under_way = !has_ended("ucp_ep_close_nbx", &connection->closing);
    return connection->is_under_way;
}

static void measure(int port, size_t count) {
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct connection connections[AT_ONCE] = {0};
    double *times = calloc(count, sizeof *times), started;
    open_worker();
    for (size_t i = 0; i < count; i++) {
        started = seconds_now();
        begin(connections, &address);
        while (goes_on(connections))
            progress();
        times[i] = seconds_now() - started;
    }
    size_t begun = 0, done = 0;
    started = seconds_now();
    for (; begun < AT_ONCE && begun < count; begun++)
        begin(&connections[begun], &address);
    while (done < count) {
        progress();
        for (size_t i = 0; i < AT_ONCE; i++) {
            if (!connections[i].is_under_way || goes_on(&connections[i]))
                continue;
            done++;
            if (begun < count) {
                begin(&connections[i], &address);
                begun++;
            }
        }
    }
    print_figures(times, count, (double)count / (seconds_now() - started));
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "serve"))
        serve();
    else if (argc == 4 && !strcmp(argv[1], "measure") && atoi(argv[2]) > 0 && atoi(argv[3]) > 0)
        measure(atoi(argv[2]), (size_t)atoi(argv[3]));
    else
        fail(argv[0], "serve, or measure PORT COUNT");
    return 0;
}
