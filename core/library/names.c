/* Names and rates; and what only asks about the system. */
#include "objects.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* -- names ------------------------------------------------------------------------------------------------------------- */

#define NAME_OF(names, value, fallback)                                                                                \
    ((size_t)(value) < sizeof(names) / sizeof *(names) && (names)[value] ? (names)[value] : (fallback))

EXPORT const char *ibv_node_type_str(enum ibv_node_type type) {
    static const char *const names[] = {
        [IBV_NODE_CA] = "InfiniBand channel adapter", [IBV_NODE_SWITCH] = "InfiniBand switch",
        [IBV_NODE_ROUTER] = "InfiniBand router",      [IBV_NODE_RNIC] = "iWARP NIC",
        [IBV_NODE_USNIC] = "usNIC",                   [IBV_NODE_USNIC_UDP] = "usNIC UDP",
        [IBV_NODE_UNSPECIFIED] = "unspecified",
    };
    return NAME_OF(names, type, "unknown");
}

EXPORT const char *ibv_port_state_str(enum ibv_port_state state) {
    static const char *const names[] = {"no state change (NOP)", "down", "init", "armed", "active", "active defer"};
    return NAME_OF(names, state, "unknown");
}

EXPORT const char *ibv_event_type_str(enum ibv_event_type event) {
    static const char *const names[] = {
        [IBV_EVENT_CQ_ERR] = "CQ error",
        [IBV_EVENT_QP_FATAL] = "local work queue catastrophic error",
        [IBV_EVENT_QP_REQ_ERR] = "invalid request local work queue error",
        [IBV_EVENT_QP_ACCESS_ERR] = "local access violation work queue error",
        [IBV_EVENT_COMM_EST] = "communication established",
        [IBV_EVENT_SQ_DRAINED] = "send queue drained",
        [IBV_EVENT_PATH_MIG] = "path migrated",
        [IBV_EVENT_PATH_MIG_ERR] = "path migration request error",
        [IBV_EVENT_DEVICE_FATAL] = "local catastrophic error",
        [IBV_EVENT_PORT_ACTIVE] = "port active",
        [IBV_EVENT_PORT_ERR] = "port error",
        [IBV_EVENT_LID_CHANGE] = "LID change",
        [IBV_EVENT_PKEY_CHANGE] = "P_Key change",
        [IBV_EVENT_SM_CHANGE] = "SM change",
        [IBV_EVENT_SRQ_ERR] = "SRQ catastrophic error",
        [IBV_EVENT_SRQ_LIMIT_REACHED] = "SRQ limit reached",
        [IBV_EVENT_QP_LAST_WQE_REACHED] = "last WQE reached",
        [IBV_EVENT_CLIENT_REREGISTER] = "client reregistration",
        [IBV_EVENT_GID_CHANGE] = "GID table change",
        [IBV_EVENT_WQ_FATAL] = "WQ fatal",
    };
    return NAME_OF(names, event, "unknown");
}

EXPORT const char *ibv_wc_status_str(enum ibv_wc_status status) {
    static const char *const names[] = {
        "success",
        "local length error",
        "local QP operation error",
        "local EE context operation error",
        "local protection error",
        "Work Request Flushed Error",
        "memory management operation error",
        "bad response error",
        "local access error",
        "remote invalid request error",
        "remote access error",
        "remote operation error",
        "transport retry counter exceeded",
        "RNR retry counter exceeded",
        "local RDD violation error",
        "remote invalid RD request",
        "aborted error",
        "invalid EE context number",
        "invalid EE context state",
        "fatal error",
        "response timeout error",
        "general error",
        "TM error",
        "TM software rendezvous",
    };
    return NAME_OF(names, status, "unknown");
}

/* -- rates ------------------------------------------------------------------------------------------------------------- */

static const struct {
    uint8_t rate;
    int multiple, mbps; /* of 2.5 Gbit/s; 0: none */
} rates[] = {
    {IBV_RATE_2_5_GBPS, 1, 2500},     {IBV_RATE_5_GBPS, 2, 5000},      {IBV_RATE_10_GBPS, 4, 10000},
    {IBV_RATE_20_GBPS, 8, 20000},     {IBV_RATE_30_GBPS, 12, 30000},   {IBV_RATE_40_GBPS, 16, 40000},
    {IBV_RATE_60_GBPS, 24, 60000},    {IBV_RATE_80_GBPS, 32, 80000},   {IBV_RATE_120_GBPS, 48, 120000},
    {IBV_RATE_14_GBPS, 6, 14062},     {IBV_RATE_56_GBPS, 22, 56250},   {IBV_RATE_112_GBPS, 45, 112500},
    {IBV_RATE_168_GBPS, 67, 168750},  {IBV_RATE_25_GBPS, 10, 25781},   {IBV_RATE_100_GBPS, 41, 103125},
    {IBV_RATE_200_GBPS, 82, 206250},  {IBV_RATE_300_GBPS, 123, 309375}, {IBV_RATE_28_GBPS, 11, 28125},
    {IBV_RATE_50_GBPS, 20, 53125},    {IBV_RATE_400_GBPS, 160, 425000}, {IBV_RATE_600_GBPS, 240, 637500},
    {IBV_RATE_800_GBPS, 320, 850000}, {IBV_RATE_1200_GBPS, 480, 1275000},
};
enum { RATES = sizeof rates / sizeof *rates };

EXPORT int ibv_rate_to_mult(enum ibv_rate rate) {
    for (size_t i = 0; i < RATES; i++)
        if (rates[i].rate == rate)
            return rates[i].multiple;
    return -1;
}

EXPORT enum ibv_rate mult_to_ibv_rate(int multiple) {
    for (size_t i = 0; i < RATES; i++)
        if (rates[i].multiple == multiple)
            return rates[i].rate;
    return IBV_RATE_MAX;
}

EXPORT int ibv_rate_to_mbps(enum ibv_rate rate) {
    for (size_t i = 0; i < RATES; i++)
        if (rates[i].rate == rate)
            return rates[i].mbps;
    return -1;
}

EXPORT enum ibv_rate mbps_to_ibv_rate(int mbps) {
    for (size_t i = 0; i < RATES; i++)
        if (rates[i].mbps == mbps)
            return rates[i].rate;
    return IBV_RATE_MAX;
}

/* -- fork(2): no memory is pinned, so it needs nothing ----------------------------------------------------------------- */

EXPORT int ibv_fork_init(void) { return 0; }
EXPORT enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }
EXPORT int ibv_dontfork_range(void *base, size_t size) { return (void)base, (void)size, 0; }
EXPORT int ibv_dofork_range(void *base, size_t size) { return (void)base, (void)size, 0; }

/* -- files of the system ------------------------------------------------------------------------------------------------ */

EXPORT const char *ibv_get_sysfs_path(void) { return "/sys"; }

EXPORT int ibv_read_sysfs_file(const char *folder, const char *file, char *text, size_t size) {
    char path[512];
    if (!size || snprintf(path, sizeof path, "%s/%s", folder, file) >= (int)sizeof path)
        return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t length = read(fd, text, size);
    close(fd);
    if (length > 0 && text[length - 1] == '\n')
        text[--length] = 0;
    else if (length >= 0 && (size_t)length < size)
        text[length] = 0;
    return (int)length;
}
