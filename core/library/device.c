/* Devices: their list, contexts, what a program may ask about them. */
#include "objects.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FIRMWARE "0.0.0"

/* -- the list ---------------------------------------------------------------------------------------------------------- */

static struct device *make_device(const struct run_device *info, const struct run_gid *gids) {
    struct device *device = calloc(1, sizeof *device);
    if (!device)
        return NULL;
    device->gids = calloc(info->gids_count + 1, sizeof *gids);
    if (!device->gids) {
        free(device);
        return NULL;
    }
    device->holders = 1;
    device->info = *info;
    memcpy(device->gids, gids, info->gids_count * sizeof *gids);
    device->ibv.node_type = IBV_NODE_CA;
    device->ibv.transport_type = IBV_TRANSPORT_IB;
    snprintf(device->ibv.name, sizeof device->ibv.name, "%.63s", info->name);
    snprintf(device->ibv.dev_name, sizeof device->ibv.dev_name, "uverbs%u", info->index);
    snprintf(device->ibv.dev_path, sizeof device->ibv.dev_path, "/sys/class/infiniband_verbs/uverbs%u", info->index);
    snprintf(device->ibv.ibdev_path, sizeof device->ibv.ibdev_path, "/sys/class/infiniband/%.63s", info->name);
    return device;
}

static void free_device(struct device *device) {
    if (__atomic_sub_fetch(&device->holders, 1, __ATOMIC_ACQ_REL))
        return;
    free(device->gids);
    free(device);
}

/* The devices as the server knows them now, ended by NULL; NULL with errno. */
static struct device **ask_devices(size_t *count) {
    struct device **list = NULL;
    uint8_t *answer = malloc(RUN_MOST);
    struct call call = {.type = RUN_DEVICES, .sent_fd = -1, .out = answer, .out_size = RUN_MOST};
    int code = answer ? control_call(&call) : ENOMEM;
    const struct run_devices *head = (const struct run_devices *)answer;
    *count = 0;
    if (!code && call.size < sizeof *head)
        code = EPROTO;
    if (!code && !(list = calloc(head->count + 1, sizeof(struct device *))))
        code = ENOMEM;
    size_t at = sizeof *head;
    for (uint32_t i = 0; !code && i < head->count; i++) {
        struct run_device info;
        if (call.size - at < sizeof info) {
            code = EPROTO;
            break;
        }
        memcpy(&info, answer + at, sizeof info);
        at += sizeof info;
        if ((call.size - at) / sizeof(struct run_gid) < info.gids_count)
            code = EPROTO;
        else if (!(list[i] = make_device(&info, (const struct run_gid *)(const void *)(answer + at))))
            code = ENOMEM;
        else
            *count = i + 1;
        at += info.gids_count * sizeof(struct run_gid);
    }
    free(answer);
    if (!code)
        return list;
    for (size_t i = 0; list && list[i]; i++)
        free_device(list[i]);
    free(list);
    errno = code;
    return NULL;
}

EXPORT struct ibv_device **ibv_get_device_list(int *count) {
    size_t found;
    struct device **list = ask_devices(&found);
    if (!list && (errno == ENOSYS || errno == ENOTCONN)) /* as without a device */
        list = calloc(1, sizeof(struct device *));
    if (count)
        *count = list ? (int)found : 0;
    return (struct ibv_device **)list;
}

EXPORT void ibv_free_device_list(struct ibv_device **list) {
    for (size_t i = 0; list && list[i]; i++)
        free_device((struct device *)list[i]);
    free(list);
}

EXPORT const char *ibv_get_device_name(struct ibv_device *device) { return device->name; }
EXPORT __be64 ibv_get_device_guid(struct ibv_device *device) { return ((struct device *)device)->info.node_guid; }
EXPORT int ibv_get_device_index(struct ibv_device *device) { return (int)((struct device *)device)->info.index; }

/* -- contexts ---------------------------------------------------------------------------------------------------------- */

/* An address that datagrams are accepted at, for each GID. */
static bool set_addresses(struct context *context) {
    struct rdmacm_addresses *addresses = &context->addresses;
    const struct run_device *info = &context->device->info;
    addresses->ifindex = info->ifindex;
    addresses->items = calloc(info->gids_count + 1, sizeof *addresses->items);
    for (uint32_t i = 0; addresses->items && i < info->gids_count; i++) {
        union ibv_gid gid;
        const uint8_t *bytes;
        memcpy(gid.raw, context->device->gids[i].gid, sizeof gid.raw);
        size_t length = gid_address(&gid, &bytes);
        addresses->items[i].is_ipv6 = length == 16;
        memcpy(addresses->items[i].address, bytes, length);
        addresses->count++;
    }
    return addresses->items;
}

static void set_functions(struct verbs_context *verbs) {
    struct ibv_context_ops *ops = &verbs->context.ops;
    ops->poll_cq = verbs_poll_cq;
    ops->req_notify_cq = verbs_req_notify_cq;
    ops->post_send = verbs_post_send;
    ops->post_recv = verbs_post_recv;
    ops->post_srq_recv = verbs_post_srq_recv;
    ops->alloc_mw = verbs_alloc_mw;
    ops->bind_mw = verbs_bind_mw;
    ops->dealloc_mw = verbs_dealloc_mw;
    verbs->query_port = verbs_query_port;
    verbs->query_device_ex = verbs_query_device_ex;
    verbs->create_cq_ex = verbs_create_cq_ex;
    verbs->create_qp_ex = verbs_create_qp_ex;
    verbs->open_qp = verbs_open_qp;
    verbs->create_srq_ex = verbs_create_srq_ex;
    verbs->get_srq_num = verbs_get_srq_num;
    verbs->open_xrcd = verbs_open_xrcd;
    verbs->close_xrcd = verbs_close_xrcd;
}

static void free_context(struct context *context) {
    if (context->report_fd >= 0)
        close(context->report_fd);
    if (context->verbs.context.async_fd >= 0)
        close(context->verbs.context.async_fd);
    if (context->verbs.context.cmd_fd >= 0)
        close(context->verbs.context.cmd_fd);
    free(context->addresses.items);
    free_device(context->device);
    free(context);
}

/* Have the server write the device's events to the pipe; 0 or an errno. */
static int follow(struct context *context) {
    struct run_number index = {.number = context->device->info.index}, number;
    struct call call = {.type = RUN_CONTEXT_OPEN, .in = &index, .in_size = sizeof index, .sent_fd = context->report_fd,
                        .out = &number, .out_size = sizeof number};
    int code = control_call(&call);
    context->server_number = code || call.size < sizeof number ? 0 : number.number;
    return code == ENOSYS || code == ENOTCONN ? 0 : code; /* without a server there are no events */
}

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *ibv) {
    struct device *device = (struct device *)ibv;
    struct context *context = calloc(1, sizeof *context);
    int ends[2] = {-1, -1};
    if (!context)
        return NULL;
    context->report_fd = context->verbs.context.async_fd = context->verbs.context.cmd_fd = -1;
    __atomic_add_fetch(&device->holders, 1, __ATOMIC_RELAXED);
    context->device = device;
    /* Programs pass this descriptor on, and it takes nothing. */
    context->verbs.context.cmd_fd = open("/dev/full", O_RDWR | O_CLOEXEC);
    if (!set_addresses(context) || pipe2(ends, O_CLOEXEC)) {
        free_context(context);
        errno = ENOMEM;
        return NULL;
    }
    struct ibv_context *open = &context->verbs.context;
    context->report_fd = ends[1];
    open->async_fd = ends[0];
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    int code = follow(context);
    if (code) {
        free_context(context);
        errno = code;
        return NULL;
    }
    open->device = ibv;
    open->num_comp_vectors = 1;
    open->abi_compat = (void *)UINTPTR_MAX; /* it is inside a verbs_context */
    pthread_mutex_init(&open->mutex, NULL);
    context->verbs.sz = sizeof context->verbs;
    set_functions(&context->verbs);
    return open;
}

EXPORT int ibv_close_device(struct ibv_context *ibv) {
    struct run_number number = {.number = context_of(ibv)->server_number};
    if (number.number)
        control(RUN_CONTEXT_CLOSE, 0, &number, sizeof number, NULL, 0);
    free_context(context_of(ibv));
    return 0;
}

/* Those that connections use stay open. */
static struct ibv_context **shared;
static size_t shared_count;
static pthread_mutex_t sharing = PTHREAD_MUTEX_INITIALIZER;

static struct ibv_context *find_shared(bool by_guid, uint64_t key) {
    for (size_t i = 0; i < shared_count; i++) {
        const struct run_device *info = &((struct device *)shared[i]->device)->info;
        if (by_guid ? info->node_guid == key : info->index == key)
            return shared[i];
    }
    return NULL;
}

/* Open those that are not yet. */
static int share_all(void) {
    size_t count;
    struct device **list = ask_devices(&count);
    if (!list)
        return errno;
    int code = 0;
    for (size_t i = 0; !code && i < count; i++) {
        if (find_shared(false, list[i]->info.index))
            continue;
        struct ibv_context **grown = realloc(shared, (shared_count + 1) * sizeof *grown);
        struct ibv_context *context = grown ? ibv_open_device(&list[i]->ibv) : NULL;
        shared = grown ? grown : shared;
        if (context)
            shared[shared_count++] = context;
        else
            code = ENOMEM;
    }
    ibv_free_device_list((struct ibv_device **)list);
    return code;
}

static struct ibv_context *share(bool by_guid, uint64_t key) {
    pthread_mutex_lock(&sharing);
    struct ibv_context *found = find_shared(by_guid, key);
    int code = found ? 0 : share_all();
    if (!found && !code && !(found = find_shared(by_guid, key)))
        code = ENODEV;
    pthread_mutex_unlock(&sharing);
    if (code)
        errno = code;
    return found;
}

struct ibv_context *library_context(uint32_t index) { return share(false, index); }
struct ibv_context *library_context_of(uint64_t node_guid) { return share(true, node_guid); }

struct ibv_context **library_contexts(int *count) {
    pthread_mutex_lock(&sharing);
    int code = share_all();
    struct ibv_context **list = code ? NULL : calloc(shared_count + 1, sizeof(struct ibv_context *));
    if (list && shared_count)
        memcpy(list, shared, shared_count * sizeof *list);
    *count = list ? (int)shared_count : 0;
    pthread_mutex_unlock(&sharing);
    if (code)
        errno = code;
    return list;
}

/* -- attributes -------------------------------------------------------------------------------------------------------- */

/* Fill in a structure of the program's, which may be shorter or longer than that of this library. */
static void copy_sized(void *to, size_t size, const void *from, size_t known) {
    memset(to, 0, size);
    memcpy(to, from, size < known ? size : known);
}

static void describe(const struct context *context, struct ibv_device_attr *attr) {
    const struct run_device *info = &context->device->info;
    *attr = (struct ibv_device_attr){
        .fw_ver = FIRMWARE,
        .node_guid = info->node_guid,
        .sys_image_guid = info->system_image_guid,
        .max_mr_size = UINT64_C(1) << 63,
        .page_size_cap = 0xFFFFF000,
        .vendor_id = 0xFFFFFF,
        .max_qp = 1 << 18, /* the server gives 64 ranges of numbers */
        .max_qp_wr = 1 << 16,
        .device_cap_flags = IBV_DEVICE_PORT_ACTIVE_EVENT | IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_RC_RNR_NAK_GEN |
                            IBV_DEVICE_SRQ_RESIZE | IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_MGT_EXTENSIONS |
                            IBV_DEVICE_XRC | IBV_DEVICE_MEM_WINDOW_TYPE_2B,
        .max_sge = RDMACM_MOST_ELEMENTS,
        .max_sge_rd = RDMACM_MOST_ELEMENTS,
        .max_cq = 1 << 20,
        .max_cqe = 1 << 22,
        .max_mr = 1 << 20,
        .max_pd = 1 << 20,
        .max_qp_rd_atom = 128,
        .max_res_rd_atom = 128 << 18,
        .max_qp_init_rd_atom = 128,
        .atomic_cap = IBV_ATOMIC_HCA,
        .max_mw = 1 << 16,
        .max_mcast_grp = 1 << 12,
        .max_mcast_qp_attach = 1 << 8,
        .max_total_mcast_qp_attach = 1 << 20,
        .max_ah = 1 << 20,
        .max_srq = 1 << 20,
        .max_srq_wr = 1 << 16,
        .max_srq_sge = RDMACM_MOST_ELEMENTS,
        .max_pkeys = 1,
        .local_ca_ack_delay = 15,
        .phys_port_cnt = 1,
    };
}

EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr) {
    describe(context_of(context), attr);
    return 0;
}

int verbs_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                          struct ibv_device_attr_ex *attr, size_t size) {
    struct ibv_device_attr_ex found = {.phys_port_cnt_ex = 1};
    if (input && input->comp_mask)
        return EINVAL;
    describe(context_of(context), &found.orig_attr);
    found.device_cap_flags_ex = found.orig_attr.device_cap_flags;
    copy_sized(attr, size, &found, sizeof found);
    return 0;
}

/* The device as it is now: its port and its GIDs may have changed. The caller frees it. */
static struct device *ask_device(struct ibv_context *ibv) {
    size_t count;
    struct device **list = ask_devices(&count), *found = NULL;
    for (size_t i = 0; list && i < count; i++) {
        if (list[i]->info.index == context_of(ibv)->device->info.index)
            found = list[i];
        else
            free_device(list[i]);
    }
    free(list);
    return found;
}

int verbs_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size) {
    if (port != 1)
        return EINVAL;
    struct device *device = ask_device(context);
    if (!device)
        return ENODEV;
    const struct run_device *info = &device->info;
    struct ibv_port_attr found = {
        .state = info->state,
        .max_mtu = info->max_mtu,
        .active_mtu = info->active_mtu,
        .gid_tbl_len = (int)info->gid_table_length,
        .port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS,
        .max_msg_sz = RDMACM_LONGEST_MESSAGE,
        .pkey_tbl_len = 1,
        .max_vl_num = 1,
        .active_width = 1,
        .active_speed = 1,
        .phys_state = (uint8_t)info->phys_state,
        .link_layer = IBV_LINK_LAYER_ETHERNET,
    };
    free_device(device);
    copy_sized(attr, size, &found, sizeof found);
    return 0;
}

/* What verbs.h's inline function falls back to has an older structure, which ends before link_layer. */
EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr) {
    return verbs_query_port(context, port, (struct ibv_port_attr *)(void *)attr, offsetof(struct ibv_port_attr, flags));
}

/* A row of the GID table; false if it has no GID. */
static bool find_gid(struct ibv_context *context, uint32_t index, struct run_gid *gid) {
    struct device *device = ask_device(context);
    bool is_found = false;
    for (uint32_t i = 0; device && !is_found && i < device->info.gids_count; i++) {
        is_found = device->gids[i].index == index;
        *gid = device->gids[i];
    }
    if (device)
        free_device(device);
    return is_found;
}

EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid) {
    struct run_gid row;
    if (port != 1 || index < 0 || (uint32_t)index >= context_of(context)->device->info.gid_table_length)
        return fail(EINVAL);
    memset(gid, 0, sizeof *gid);
    if (find_gid(context, (uint32_t)index, &row))
        memcpy(gid->raw, row.gid, sizeof gid->raw);
    return 0;
}

static void fill_entry(const struct run_gid *row, struct ibv_gid_entry *entry) {
    *entry = (struct ibv_gid_entry){.gid_index = row->index, .port_num = 1, .gid_type = row->type,
                                    .ndev_ifindex = row->ifindex};
    memcpy(entry->gid.raw, row->gid, sizeof entry->gid.raw);
}

EXPORT int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
                             uint32_t flags, size_t size) {
    struct run_gid row;
    struct ibv_gid_entry found;
    if (port != 1 || flags || index >= context_of(context)->device->info.gid_table_length)
        return EINVAL;
    if (!find_gid(context, index, &row))
        return ENODATA;
    fill_entry(&row, &found);
    copy_sized(entry, size, &found, sizeof found);
    return 0;
}

EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t most,
                                    uint32_t flags, size_t size) {
    if (flags)
        return -EOPNOTSUPP;
    struct device *device = ask_device(context);
    if (!device)
        return -ENODEV;
    ssize_t count = device->info.gids_count > most ? -EINVAL : (ssize_t)device->info.gids_count;
    for (ssize_t i = 0; i < count; i++) {
        struct ibv_gid_entry found;
        fill_entry(&device->gids[i], &found);
        copy_sized((uint8_t *)entries + (size_t)i * size, size, &found, sizeof found);
    }
    free_device(device);
    return count;
}

EXPORT int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned index, unsigned *type) {
    struct run_gid row;
    if (port != 1)
        return fail(EINVAL);
    *type = find_gid(context, index, &row) ? 1 : 0; /* RoCE v2 is 1 here, and 2 in enum ibv_gid_type */
    return 0;
}

EXPORT int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey) {
    (void)context;
    if (port != 1 || index)
        return fail(EINVAL);
    *pkey = htons(RDMACM_DEFAULT_PKEY);
    return 0;
}

EXPORT int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, __be16 pkey) {
    (void)context;
    return port == 1 && ntohs(pkey) == RDMACM_DEFAULT_PKEY ? 0 : fail(EINVAL);
}

/* -- asynchronous events ----------------------------------------------------------------------------------------------- */

void report_async(struct ibv_context *context, const struct ibv_async_event *event) {
    ssize_t written = write(context_of(context)->report_fd, event, sizeof *event);
    (void)written; /* a program that reads none loses them */
}

EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
    return read(context->async_fd, event, sizeof *event) == (ssize_t)sizeof *event ? 0 : -1;
}

EXPORT void ibv_ack_async_event(struct ibv_async_event *event) { (void)event; }
