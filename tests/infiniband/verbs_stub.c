/* One verbs device without hardware, with what ibacm needs: preloaded, it replaces libibverbs.
 *
 * STUB_GUID and STUB_LID name its port. MADs go through umad2sim. Work requests are not sent and never complete, so
 * the daemon learns no address from its multicast group; a file has to give it the addresses.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <endian.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include <infiniband/verbs.h>

static struct ibv_device dev;
static struct { struct verbs_context v; char slack[8192]; } ctx;   /* struct ibv_context is the end of struct verbs_context */

static uint64_t guid(void) { return strtoull(getenv("STUB_GUID"), 0, 0); }
static int silent_fd(void) { int f[2]; return pipe(f) ? -1 : f[0]; }
static void forever(void) { for (;;) sleep(1000); }

struct ibv_device **ibv_get_device_list(int *n)
{
	struct ibv_device **l = calloc(2, sizeof *l);
	strcpy(dev.name, "ibsim0");
	strcpy(dev.dev_name, "uverbs0");
	dev.node_type = IBV_NODE_CA;
	dev.transport_type = IBV_TRANSPORT_IB;
	l[0] = &dev;
	if (n) *n = 1;
	return l;
}
void ibv_free_device_list(struct ibv_device **l) { free(l); }
__be64 ibv_get_device_guid(struct ibv_device *d) { return htobe64(guid() - 1); }
struct ibv_context *ibv_open_device(struct ibv_device *d)
{
	struct ibv_context *c = &ctx.v.context;
	c->device = d;
	c->num_comp_vectors = 1;
	c->cmd_fd = -1;
	c->async_fd = silent_fd();
	return c;
}
int ibv_close_device(struct ibv_context *c) { return 0; }
int ibv_query_device(struct ibv_context *c, struct ibv_device_attr *a)
{
	memset(a, 0, sizeof *a);
	a->phys_port_cnt = a->max_pkeys = 1;
	a->max_qp_wr = a->max_cqe = 1024;
	a->max_sge = 4;
	return 0;
}
#undef ibv_query_port
int ibv_query_port(struct ibv_context *c, uint8_t p, struct _compat_ibv_port_attr *out)
{
	struct ibv_port_attr *a = (void *)out;
	memset(out, 0, 44);                     /* of the structure's first version */
	a->state = IBV_PORT_ACTIVE;
	a->max_mtu = a->active_mtu = IBV_MTU_2048;
	a->gid_tbl_len = a->pkey_tbl_len = 1;
	a->lid = atoi(getenv("STUB_LID"));
	a->sm_lid = 1;
	a->active_width = 2;
	a->active_speed = 1;
	a->link_layer = IBV_LINK_LAYER_INFINIBAND;
	a->max_msg_sz = 1 << 30;
	return 0;
}
int ibv_query_gid(struct ibv_context *c, uint8_t p, int i, union ibv_gid *g)
{
	g->global.subnet_prefix = htobe64(0xfe80000000000000ULL);
	g->global.interface_id = htobe64(guid());
	return i ? -1 : 0;
}
int ibv_query_pkey(struct ibv_context *c, uint8_t p, int i, __be16 *k) { *k = 0xffff; return i ? -1 : 0; }
int ibv_get_pkey_index(struct ibv_context *c, uint8_t p, __be16 k) { return 0; }
int ibv_get_async_event(struct ibv_context *c, struct ibv_async_event *e) { forever(); return -1; }
void ibv_ack_async_event(struct ibv_async_event *e) {}
struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) { struct ibv_pd *p = calloc(1, sizeof *p); p->context = c; return p; }
int ibv_dealloc_pd(struct ibv_pd *p) { return 0; }
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c)
{
	struct ibv_comp_channel *p = calloc(1, sizeof *p);
	p->context = c;
	p->fd = silent_fd();
	return p;
}
int ibv_destroy_comp_channel(struct ibv_comp_channel *p) { return 0; }
int ibv_get_cq_event(struct ibv_comp_channel *c, struct ibv_cq **q, void **x) { forever(); return -1; }
void ibv_ack_cq_events(struct ibv_cq *q, unsigned n) {}

static int no_poll(struct ibv_cq *q, int n, struct ibv_wc *w) { return 0; }
static int no_notify(struct ibv_cq *q, int n) { return 0; }
static int no_send(struct ibv_qp *q, struct ibv_send_wr *w, struct ibv_send_wr **b) { return 0; }
static int no_recv(struct ibv_qp *q, struct ibv_recv_wr *w, struct ibv_recv_wr **b) { return 0; }

struct ibv_cq *ibv_create_cq(struct ibv_context *c, int n, void *x, struct ibv_comp_channel *ch, int v)
{
	struct ibv_cq *q = calloc(1, sizeof *q);
	q->context = c;
	q->channel = ch;
	q->cq_context = x;
	c->ops.poll_cq = no_poll;
	c->ops.req_notify_cq = no_notify;
	c->ops.post_send = no_send;
	c->ops.post_recv = no_recv;
	return q;
}
int ibv_destroy_cq(struct ibv_cq *q) { return 0; }
struct ibv_qp *ibv_create_qp(struct ibv_pd *p, struct ibv_qp_init_attr *a)
{
	struct ibv_qp *q = calloc(1, sizeof *q);
	q->context = p->context;
	q->pd = p;
	q->qp_num = 0x48;
	return q;
}
int ibv_destroy_qp(struct ibv_qp *q) { return 0; }
int ibv_modify_qp(struct ibv_qp *q, struct ibv_qp_attr *a, int m) { return 0; }
#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *p, void *a, size_t n, int f)
{
	struct ibv_mr *m = calloc(1, sizeof *m);
	m->pd = p;
	m->addr = a;
	m->length = n;
	return m;
}
int ibv_dereg_mr(struct ibv_mr *m) { return 0; }
struct ibv_ah *ibv_create_ah(struct ibv_pd *p, struct ibv_ah_attr *a) { return calloc(1, sizeof(struct ibv_ah)); }
int ibv_destroy_ah(struct ibv_ah *a) { return 0; }
int ibv_attach_mcast(struct ibv_qp *q, const union ibv_gid *g, uint16_t l) { return 0; }
int ibv_detach_mcast(struct ibv_qp *q, const union ibv_gid *g, uint16_t l) { return 0; }

/* A kernel without RDMA has no netlink protocol 20, and ibacm aborts; it gets a socket that never receives. */
int socket(int domain, int type, int protocol)
{
	int (*real)(int, int, int) = dlsym(RTLD_NEXT, "socket");
	return real(domain, type, domain == AF_NETLINK && protocol == 20 ? 2 : protocol);
}
