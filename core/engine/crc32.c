/* CRC-32 with the polynomial of Ethernet, bits reflected.
 *
 * A register of n bits stands for a polynomial over GF(2) whose highest coefficient is bit 0. Everything below follows
 * from that and from x^k mod P; all constants are computed when the module is loaded.
 */
#include "rdmacm_core.h"

#include <string.h>

#define POLYNOMIAL UINT32_C(0xEDB88320) /* P without x^32 */

/* tables[k][b]: what byte b in the low end of the register becomes k + 1 bytes later. */
static uint32_t tables[8][256];

static uint32_t times_x(uint32_t value) { return value >> 1 ^ (value & 1 ? POLYNOMIAL : 0); }

static uint64_t load_le64(const uint8_t *p) {
    uint64_t value;
    memcpy(&value, p, sizeof value);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

/* Without the inversions before and after. */
static uint32_t run_table(uint32_t crc, const uint8_t *p, size_t length) {
    for (; length >= 8; p += 8, length -= 8) {
        uint64_t word = load_le64(p) ^ crc;
        crc = tables[7][word & 0xFF] ^ tables[6][word >> 8 & 0xFF] ^ tables[5][word >> 16 & 0xFF] ^
              tables[4][word >> 24 & 0xFF] ^ tables[3][word >> 32 & 0xFF] ^ tables[2][word >> 40 & 0xFF] ^
              tables[1][word >> 48 & 0xFF] ^ tables[0][word >> 56];
    }
    for (; length; p++, length--)
        crc = crc >> 8 ^ tables[0][(crc ^ *p) & 0xFF];
    return crc;
}

static uint32_t (*run)(uint32_t crc, const uint8_t *p, size_t length) = run_table;
static const char *method = "table";

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

/* A 128-bit register holds the last 16 bytes of a polynomial M = low * x^64 + high, where `low` are the first 8 bytes.
 * To append d bits, M * x^d = low * x^(64 + d) + high * x^d. A carry-less product of two reflected 64-bit registers is
 * the reflected 128-bit register of their product times x, so the factors are x^(63 + d) and x^(d - 1), reduced to 32
 * bits, which are the upper half of a reflected register of 64 bits. */
static uint64_t fold_512[2], fold_128[2];

static uint64_t factor(unsigned power) {
    uint32_t value = UINT32_C(0x80000000); /* 1 */
    while (power--)
        value = times_x(value);
    return (uint64_t)value << 32;
}

__attribute__((target("pclmul,sse2"))) static inline __m128i fold(__m128i value, __m128i factors, __m128i next) {
    return _mm_xor_si128(
        next, _mm_xor_si128(_mm_clmulepi64_si128(value, factors, 0x00), _mm_clmulepi64_si128(value, factors, 0x11)));
}

static inline __m128i load128(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)(const void *)p); }

__attribute__((target("pclmul,sse2"))) static uint32_t run_pclmulqdq(uint32_t crc, const uint8_t *p, size_t length) {
    if (length < 64)
        return run_table(crc, p, length);
    const __m128i by_512 = load128((const uint8_t *)fold_512), by_128 = load128((const uint8_t *)fold_128);
    __m128i a = _mm_xor_si128(load128(p), _mm_cvtsi32_si128((int)crc));
    __m128i b = load128(p + 16), c = load128(p + 32), d = load128(p + 48);
    for (p += 64, length -= 64; length >= 64; p += 64, length -= 64) {
        a = fold(a, by_512, load128(p));
        b = fold(b, by_512, load128(p + 16));
        c = fold(c, by_512, load128(p + 32));
        d = fold(d, by_512, load128(p + 48));
    }
    d = fold(fold(fold(a, by_128, b), by_128, c), by_128, d);
    for (; length >= 16; p += 16, length -= 16)
        d = fold(d, by_128, load128(p));
    /* What is left is congruent to the bytes so far: it is a message of 16 bytes with the same remainder. */
    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)(void *)rest, d);
    return run_table(run_table(0, rest, sizeof rest), p, length);
}

static void find_instructions(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("pclmul"))
        return;
    fold_512[0] = factor(63 + 512), fold_512[1] = factor(512 - 1);
    fold_128[0] = factor(63 + 128), fold_128[1] = factor(128 - 1);
    run = run_pclmulqdq;
    method = "pclmulqdq";
}

#elif defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif

__attribute__((target("+crc"))) static uint32_t run_armv8(uint32_t crc, const uint8_t *p, size_t length) {
    for (; length >= 8; p += 8, length -= 8)
        crc = __builtin_aarch64_crc32x(crc, load_le64(p));
    for (; length; p++, length--)
        crc = __builtin_aarch64_crc32b(crc, *p);
    return crc;
}

static void find_instructions(void) {
    if (getauxval(AT_HWCAP) & HWCAP_CRC32) {
        run = run_armv8;
        method = "armv8";
    }
}

#else

static void find_instructions(void) {}

#endif

void rdmacm_crc32_init(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t value = byte;
        for (int bit = 0; bit < 8; bit++)
            value = times_x(value);
        tables[0][byte] = value;
    }
    for (int k = 1; k < 8; k++)
        for (int byte = 0; byte < 256; byte++)
            tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 0xFF];
    find_instructions();
}

uint32_t rdmacm_crc32(uint32_t crc, const void *data, size_t length) { return ~run(~crc, data, length); }

uint32_t rdmacm_crc32_by_table(uint32_t crc, const void *data, size_t length) { return ~run_table(~crc, data, length); }

const char *rdmacm_crc32_method(void) { return method; }

void rdmacm_init(void) {
    rdmacm_crc32_init();
    rdmacm_icrc_init();
}
