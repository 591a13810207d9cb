/* libibverbs without hardware: devices as the tests describe them, of kinds that no software device is.
 *
 * A test fills `fake_devices`, and sets what the library shall do in `fake`. Posted requests are written to `fake.log`,
 * one line each. RDMA WRITE and ATOMIC WRITE of a queue pair change this process's memory at once, and every request
 * completes.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <infiniband/verbs.h>

#define EXPORT __attribute__((visibility("default")))
enum { DEVICES = 4, ROWS = 256, PORTS = 2, COMPLETIONS = 256, FLUSH = 1 << 11, ATOMIC_WRITE = 1 << 12 };

struct fake_device {
	char name[32];
	int node_type, transport_type, ports, link_layer, state, gid_tbl_len, pkey_tbl_len, active_speed, active_speed_ex;
	uint64_t cap_flags_ex;
};

EXPORT struct fake_device fake_devices[DEVICES];
EXPORT int fake_devices_count;
EXPORT struct ibv_gid_entry fake_gids[ROWS];
EXPORT int fake_gids_count;

EXPORT struct fake {
	/* The most inline data that a queue pair may have, and the errno of a larger one. */
	int max_inline, inline_errno;
	/* Work requests and inline data are granted in multiples of these; 0 for as asked. */
	int granted_wr_step, granted_inline;
	/* The errno of ibv_create_ah(), of wr_complete(); 0 for success. */
	int ah_errno, complete_errno;
	/* The operations of extended queue pairs; 0: ibv_create_qp_ex() is EOPNOTSUPP. */
	int send_ops;
	/* The refused access flags of ibv_reg_mr_iova2(), and its errno. */
	int refused_access, access_errno;
	/* What ibv_fork_init() returns, how often it and ibv_query_pkey() were called, address handles that are there. */
	int fork_init, fork_inits, pkey_queries, ahs;
	/* The last ibv_reg_mr_iova2()'s access. */
	int access;
	/* How many calls of ibv_destroy_cq() are refused from now on, with EBUSY, and how often it was called. */
	int busy_cqs, cq_ends;
	/* Contexts, completion queues and channels that are there. */
	int contexts, cqs, channels;
	char log[4096];
} fake;

/* Changed before each test: what an earlier one has left does not count, and is not refused. */
EXPORT int fake_test;

static void note(const char *format, ...)
{
	size_t used = strlen(fake.log);
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(fake.log + used, sizeof fake.log - used, format, arguments);
	va_end(arguments);
}

struct opened {
	struct verbs_context front; /* the context is its end */
	struct fake_device *device;
	int writer; /* of the events' pipe */
	int test;
};

struct channel {
	struct ibv_comp_channel comp; /* refcnt: its queues */
	int writer, test;
};

struct queue {
	struct ibv_cq cq;
	int test;
	struct ibv_wc completions[COMPLETIONS];
	int first, count;
};

/* As newer libraries have it, with wr_flush. */
struct pair {
	struct ibv_qp_ex ex;
	void (*slack[4])(struct ibv_qp_ex *, uint32_t, uint64_t, size_t, uint8_t, uint8_t);
	struct ibv_wc batch[COMPLETIONS];
	int batch_count, begun;
	char text[4096];
};

static struct ibv_device devices[DEVICES];

static struct opened *opened_of(struct ibv_context *context)
{
	return (struct opened *)((char *)context - offsetof(struct verbs_context, context));
}

/* -- devices ------------------------------------------------------------------------------------------------------- */

EXPORT struct ibv_device **ibv_get_device_list(int *count)
{
	struct ibv_device **list = calloc(DEVICES + 1, sizeof *list);
	for (int i = 0; i < fake_devices_count; i++) {
		snprintf(devices[i].name, sizeof devices[i].name, "%s", fake_devices[i].name);
		snprintf(devices[i].dev_name, sizeof devices[i].dev_name, "uverbs%d", i + 200);
		devices[i].node_type = fake_devices[i].node_type;
		devices[i].transport_type = fake_devices[i].transport_type;
		list[i] = &devices[i];
	}
	if (count)
		*count = fake_devices_count;
	return list;
}
EXPORT void ibv_free_device_list(struct ibv_device **list) { free(list); }
EXPORT const char *ibv_get_device_name(struct ibv_device *device) { return device->name; }
EXPORT __be64 ibv_get_device_guid(struct ibv_device *device) { return 0x0102030405060708; }
EXPORT int ibv_get_device_index(struct ibv_device *device) { return 200 + (int)(device - devices); }

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *into)
{
	struct queue *queue = (struct queue *)cq;
	int found = 0;
	for (; found < most && queue->count; found++, queue->count--) {
		into[found] = queue->completions[queue->first];
		queue->first = (queue->first + 1) % COMPLETIONS;
	}
	return found;
}
static struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	struct ibv_mw *mw = calloc(1, sizeof *mw);
	mw->pd = pd, mw->type = type, mw->rkey = 0xabc00;
	return mw;
}
static int dealloc_mw(struct ibv_mw *mw) { free(mw); return 0; }
static int req_notify_cq(struct ibv_cq *cq, int solicited) { return 0; }

static void complete(struct ibv_qp *qp, const struct ibv_wc *wc)
{
	struct queue *queue = (struct queue *)qp->send_cq;
	queue->completions[(queue->first + queue->count++) % COMPLETIONS] = *wc;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	for (; wr; wr = wr->next) {
		note("post_send %d opcode %d\n", (int)wr->wr_id, wr->opcode);
		complete(qp, &(struct ibv_wc){.wr_id = wr->wr_id, .qp_num = qp->qp_num});
	}
	return 0;
}
static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) { return 0; }

static int query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
			   struct ibv_device_attr_ex *attr, size_t size)
{
	struct fake_device *device = opened_of(context)->device;
	memset(attr, 0, size);
	attr->orig_attr.phys_port_cnt = device->ports;
	attr->orig_attr.max_qp = attr->orig_attr.max_cq = attr->orig_attr.max_mr = attr->orig_attr.max_srq = 1000;
	attr->orig_attr.max_pd = attr->orig_attr.max_ah = 1000;
	attr->orig_attr.max_qp_wr = attr->orig_attr.max_cqe = 8192;
	attr->orig_attr.max_sge = attr->orig_attr.max_sge_rd = 30;
	attr->orig_attr.max_mr_size = 1ull << 40;
	attr->orig_attr.max_pkeys = device->pkey_tbl_len;
	attr->orig_attr.device_cap_flags = (uint32_t)device->cap_flags_ex;
	attr->device_cap_flags_ex = device->cap_flags_ex;
	return 0;
}

static int query_port(struct ibv_context *context, uint8_t number, struct ibv_port_attr *attr, size_t size)
{
	struct fake_device *device = opened_of(context)->device;
	memset(attr, 0, size);
	attr->state = device->state;
	attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
	attr->gid_tbl_len = device->gid_tbl_len;
	attr->pkey_tbl_len = device->pkey_tbl_len;
	attr->link_layer = device->link_layer;
	attr->max_msg_sz = 1 << 30;
	attr->active_width = 2;
	attr->active_speed = device->active_speed;
	/* active_speed_ex, which is newer than some headers, follows port_cap_flags2. */
	size_t at = (offsetof(struct ibv_port_attr, port_cap_flags2) + 2 + 3) & ~(size_t)3;
	if (size >= at + 4)
		memcpy((char *)attr + at, &device->active_speed_ex, 4);
	return 0;
}

static struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct opened *opened = calloc(1, sizeof *opened);
	int ends[2];
	if (pipe(ends))
		return NULL;
	struct ibv_context *context = &opened->front.context;
	fake.contexts++;
	opened->test = fake_test;
	opened->device = &fake_devices[device - devices];
	opened->writer = ends[1];
	opened->front.sz = sizeof opened->front;
	opened->front.query_device_ex = query_device_ex;
	opened->front.query_port = query_port;
	opened->front.create_qp_ex = create_qp_ex;
	context->device = device;
	context->abi_compat = (void *)-1;
	context->num_comp_vectors = 1;
	context->cmd_fd = open("/dev/null", O_RDONLY);
	context->async_fd = ends[0];
	context->ops.poll_cq = poll_cq;
	context->ops.req_notify_cq = req_notify_cq;
	context->ops.alloc_mw = alloc_mw;
	context->ops.dealloc_mw = dealloc_mw;
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	return context;
}
EXPORT int ibv_close_device(struct ibv_context *context)
{
	struct opened *opened = opened_of(context);
	fake.contexts -= opened->test == fake_test;
	close(context->cmd_fd);
	close(context->async_fd);
	close(opened->writer);
	free(opened);
	return 0;
}
#undef ibv_query_port
EXPORT int ibv_query_port(struct ibv_context *context, uint8_t number, struct _compat_ibv_port_attr *attr)
{
	return query_port(context, number, (struct ibv_port_attr *)attr, 48);
}
EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr) { return ENOSYS; }
EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) { return ENOSYS; }
EXPORT int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	fake.pkey_queries++;
	*pkey = htobe16(index == 0 ? 0xffff : index == 1 ? 0x8001 : 0);
	return 0;
}
EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t most,
				    uint32_t flags, size_t size)
{
	ssize_t found = 0;
	for (int i = 0; i < fake_gids_count && found < (ssize_t)most; i++)
		entries[found++] = fake_gids[i];
	return found;
}

/* -- events -------------------------------------------------------------------------------------------------------- */

EXPORT void fake_event(struct ibv_context *context, int type, int port)
{
	struct ibv_async_event event = {.event_type = type, .element.port_num = port};
	if (write(opened_of(context)->writer, &event, sizeof event) != sizeof event)
		abort();
}
EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	return read(context->async_fd, event, sizeof *event) == sizeof *event ? 0 : -1;
}
EXPORT void ibv_ack_async_event(struct ibv_async_event *event) {}

/* -- objects ------------------------------------------------------------------------------------------------------- */

static int freed(void *object) { free(object); return 0; }

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = calloc(1, sizeof *pd);
	pd->context = context;
	return pd;
}
EXPORT int ibv_dealloc_pd(struct ibv_pd *pd) { return freed(pd); }
EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
	static uint32_t key;
	fake.access = access;
	if (access & fake.refused_access) {
		errno = fake.access_errno;
		return NULL;
	}
	struct ibv_mr *mr = calloc(1, sizeof *mr);
	mr->pd = pd, mr->addr = addr, mr->length = length;
	mr->lkey = mr->rkey = ++key << 8;
	return mr;
}
EXPORT int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *a, size_t n, int access) { return ENOSYS; }
EXPORT int ibv_dereg_mr(struct ibv_mr *mr) { return freed(mr); }
EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct channel *channel = calloc(1, sizeof *channel);
	int ends[2];
	if (pipe(ends))
		return NULL;
	fake.channels++;
	channel->comp.context = context, channel->comp.fd = ends[0], channel->writer = ends[1];
	channel->test = fake_test;
	return &channel->comp;
}
EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *comp)
{
	struct channel *channel = (struct channel *)comp;
	if (comp->refcnt)
		return EBUSY;
	fake.channels -= channel->test == fake_test;
	close(comp->fd);
	close(channel->writer);
	return freed(channel);
}
EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *user, struct ibv_comp_channel *channel,
				    int vector)
{
	struct queue *queue = calloc(1, sizeof *queue);
	queue->cq.context = context, queue->cq.channel = channel, queue->cq.cqe = cqe;
	queue->test = fake_test;
	channel->refcnt++;
	fake.cqs++;
	return &queue->cq;
}
EXPORT int ibv_resize_cq(struct ibv_cq *cq, int cqe) { return ENOSYS; }
EXPORT int ibv_destroy_cq(struct ibv_cq *cq)
{
	if (((struct queue *)cq)->test == fake_test) {
		fake.cq_ends++;
		if (fake.busy_cqs) {
			fake.busy_cqs--;
			return EBUSY;
		}
		fake.cqs--;
	}
	cq->channel->refcnt--;
	return freed(cq);
}
EXPORT int ibv_get_cq_event(struct ibv_comp_channel *c, struct ibv_cq **cq, void **x) { errno = EAGAIN; return -1; }
EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count) {}
EXPORT struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr) { errno = ENOSYS; return NULL; }
EXPORT int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask) { return ENOSYS; }
EXPORT int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr) { return ENOSYS; }
EXPORT int ibv_destroy_srq(struct ibv_srq *srq) { return 0; }
EXPORT struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	if (fake.ah_errno) {
		errno = fake.ah_errno;
		return NULL;
	}
	fake.ahs++;
	struct ibv_ah *ah = calloc(1, sizeof *ah);
	ah->pd = pd;
	return ah;
}
EXPORT int ibv_destroy_ah(struct ibv_ah *ah) { fake.ahs--; return freed(ah); }
EXPORT int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid) { return ENOSYS; }
EXPORT int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid) { return ENOSYS; }
EXPORT int ibv_fork_init(void) { fake.fork_inits++; return fake.fork_init; }
EXPORT enum ibv_fork_status ibv_is_fork_initialized(void)
{
	return fake.fork_inits && !fake.fork_init ? IBV_FORK_ENABLED : IBV_FORK_DISABLED;
}

/* -- queue pairs --------------------------------------------------------------------------------------------------- */

static int grant(struct ibv_qp_cap *cap)
{
	if ((int)cap->max_inline_data > fake.max_inline)
		return fake.inline_errno;
	if ((int)cap->max_inline_data < fake.granted_inline)
		cap->max_inline_data = fake.granted_inline;
	int step = fake.granted_wr_step;
	if (step) {
		cap->max_send_wr = (cap->max_send_wr + step - 1) / step * step;
		cap->max_recv_wr = (cap->max_recv_wr + step - 1) / step * step;
	}
	return 0;
}

static struct pair *new_pair(struct ibv_context *context, struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	static uint32_t number = 0x100;
	int code = grant(&attr->cap);
	if (code) {
		errno = code;
		return NULL;
	}
	struct pair *pair = calloc(1, sizeof *pair);
	struct ibv_qp *qp = &pair->ex.qp_base;
	qp->context = context, qp->pd = pd, qp->qp_type = attr->qp_type, qp->qp_num = ++number;
	qp->send_cq = attr->send_cq, qp->recv_cq = attr->recv_cq;
	return pair;
}

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct pair *pair = new_pair(pd->context, pd, attr);
	return pair ? &pair->ex.qp_base : NULL;
}
EXPORT int ibv_destroy_qp(struct ibv_qp *qp) { return freed(qp); }
EXPORT int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (mask & IBV_QP_STATE)
		qp->state = attr->qp_state;
	return 0;
}
EXPORT int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	memset(attr, 0, sizeof *attr);
	attr->qp_state = attr->cur_qp_state = qp->state;
	attr->path_mtu = IBV_MTU_1024;
	return 0;
}

static struct pair *pair_of(struct ibv_qp_ex *ex) { return (struct pair *)ex; }

static void begin(struct ibv_qp_ex *ex, enum ibv_wc_opcode opcode, const char *format, ...)
{
	struct pair *pair = pair_of(ex);
	size_t used = strlen(pair->text);
	va_list arguments;
	used += snprintf(pair->text + used, sizeof pair->text - used, "%d flags %u ", (int)ex->wr_id, ex->wr_flags);
	va_start(arguments, format);
	vsnprintf(pair->text + used, sizeof pair->text - used, format, arguments);
	va_end(arguments);
	pair->batch[pair->batch_count++] = (struct ibv_wc){.wr_id = ex->wr_id, .opcode = opcode, .qp_num = ex->qp_base.qp_num};
}
static void set(struct ibv_qp_ex *ex, const char *format, ...)
{
	struct pair *pair = pair_of(ex);
	size_t used = strlen(pair->text);
	va_list arguments;
	va_start(arguments, format);
	used--; /* the line's end */
	vsnprintf(pair->text + used, sizeof pair->text - used, format, arguments);
	va_end(arguments);
}

static void wr_send(struct ibv_qp_ex *ex) { begin(ex, IBV_WC_SEND, "send\n"); }
static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm) { begin(ex, IBV_WC_SEND, "send_imm %x\n", be32toh(imm)); }
static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t key) { begin(ex, IBV_WC_SEND, "send_inv %x\n", key); }
static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t key, uint64_t at)
{
	begin(ex, IBV_WC_RDMA_WRITE, "rdma_write %x %lx\n", key, at);
}
static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t key, uint64_t at, __be32 imm)
{
	begin(ex, IBV_WC_RDMA_WRITE, "rdma_write_imm %x %lx %x\n", key, at, be32toh(imm));
}
static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t key, uint64_t at)
{
	begin(ex, IBV_WC_RDMA_READ, "rdma_read %x %lx\n", key, at);
}
static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t key, uint64_t at, uint64_t compare, uint64_t swap)
{
	begin(ex, IBV_WC_COMP_SWAP, "atomic_cmp_swp %x %lx %lx %lx\n", key, at, compare, swap);
}
static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t key, uint64_t at, uint64_t add)
{
	begin(ex, IBV_WC_FETCH_ADD, "atomic_fetch_add %x %lx %lx\n", key, at, add);
}
static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t key) { begin(ex, IBV_WC_LOCAL_INV, "local_inv %x\n", key); }
static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t key, const struct ibv_mw_bind_info *info)
{
	begin(ex, IBV_WC_BIND_MW, "bind_mw %x %lx+%lu\n", key, info->addr, info->length);
}
static void wr_atomic_write(struct ibv_qp_ex *ex, uint32_t key, uint64_t at, const void *data)
{
	begin(ex, 9, "atomic_write %x %lx %.8s\n", key, at, (const char *)data);
	memcpy((void *)at, data, 8);
}
static void wr_flush(struct ibv_qp_ex *ex, uint32_t key, uint64_t at, size_t length, uint8_t type, uint8_t level)
{
	begin(ex, 8, "flush %x %lx %zu %u %u\n", key, at, length, type, level);
}
static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
	set(ex, " to %x %x\n", qpn, qkey);
}
static void wr_set_inline_data(struct ibv_qp_ex *ex, void *data, size_t length)
{
	set(ex, " inline %.*s\n", (int)length, (char *)data);
}
static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *list)
{
	set(ex, " %zu elements\n", count);
	for (size_t i = 0; i < count; i++)
		set(ex, " %lx+%u\n", list[i].addr, list[i].length);
}
static void wr_start(struct ibv_qp_ex *ex)
{
	struct pair *pair = pair_of(ex);
	if (pair->begun++)
		note("wr_start within a batch\n");
	pair->batch_count = 0;
	pair->text[0] = 0;
}
static int wr_complete(struct ibv_qp_ex *ex)
{
	struct pair *pair = pair_of(ex);
	pair->begun--;
	if (fake.complete_errno)
		return fake.complete_errno;
	note("%s", pair->text);
	for (int i = 0; i < pair->batch_count; i++)
		complete(&ex->qp_base, &pair->batch[i]);
	return 0;
}
static void wr_abort(struct ibv_qp_ex *ex) { pair_of(ex)->begun--; note("abort\n"); }

static struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	if (!fake.send_ops || attr->send_ops_flags & ~(uint64_t)fake.send_ops) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	struct pair *pair = new_pair(context, attr->pd, (struct ibv_qp_init_attr *)attr);
	if (!pair)
		return NULL;
	struct ibv_qp_ex *ex = &pair->ex;
	ex->wr_send = wr_send, ex->wr_send_imm = wr_send_imm, ex->wr_send_inv = wr_send_inv;
	ex->wr_rdma_write = wr_rdma_write, ex->wr_rdma_write_imm = wr_rdma_write_imm, ex->wr_rdma_read = wr_rdma_read;
	ex->wr_atomic_cmp_swp = wr_atomic_cmp_swp, ex->wr_atomic_fetch_add = wr_atomic_fetch_add;
	ex->wr_local_inv = wr_local_inv, ex->wr_bind_mw = wr_bind_mw;
	ex->wr_set_ud_addr = wr_set_ud_addr, ex->wr_set_inline_data = wr_set_inline_data;
	ex->wr_set_sge_list = wr_set_sge_list;
	ex->wr_start = wr_start, ex->wr_complete = wr_complete, ex->wr_abort = wr_abort;
	if (attr->send_ops_flags & ATOMIC_WRITE)
		ex->wr_atomic_write = wr_atomic_write;
	if (attr->send_ops_flags & FLUSH) /* the member after wr_atomic_write, which is newer than some headers */
		*(void **)((char *)&ex->wr_atomic_write + sizeof(void *)) = (void *)wr_flush;
	return &ex->qp_base;
}
EXPORT struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp) { return (struct ibv_qp_ex *)qp; }
