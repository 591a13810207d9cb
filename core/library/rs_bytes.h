/* rsocket(7): numbers in network byte order, at any address. */
#ifndef RDMACM_RS_BYTES_H
#define RDMACM_RS_BYTES_H

#include <endian.h>
#include <stdint.h>
#include <string.h>

static inline void put16(uint8_t *bytes, uint16_t value) {
    value = htobe16(value);
    memcpy(bytes, &value, sizeof value);
}

static inline uint16_t get16(const uint8_t *bytes) {
    uint16_t value;
    memcpy(&value, bytes, sizeof value);
    return be16toh(value);
}

static inline void put32(uint8_t *bytes, uint32_t value) {
    value = htobe32(value);
    memcpy(bytes, &value, sizeof value);
}

static inline uint32_t get32(const uint8_t *bytes) {
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return be32toh(value);
}

static inline void put64(uint8_t *bytes, uint64_t value) {
    value = htobe64(value);
    memcpy(bytes, &value, sizeof value);
}

static inline uint64_t get64(const uint8_t *bytes) {
    uint64_t value;
    memcpy(&value, bytes, sizeof value);
    return be64toh(value);
}

#endif
