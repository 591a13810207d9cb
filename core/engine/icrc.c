/* The invariant CRC of RoCEv2 packets (InfiniBand Architecture 7.8.1 and annex A17).
 *
 * rdmacm/proto/roce/icrc.py explains it: the CRC is affine, so the effect of a length, of an identification and of the
 * masked byte of the BTH is a number that is exclusive-ored to the CRC to begin with; and a difference between two CRCs
 * can be taken back over the bytes of a packet to the headers, where it says which identification causes it.
 */
#include "rdmacm_core.h"

#include <string.h>

enum { IPV4_LENGTH = 8 + 20 + 8, IPV6_LENGTH = 8 + 40 + 8, LONGEST_HEADER = IPV6_LENGTH };
enum { IPV4 = 0, IPV6 = 1 };

/* The effect of a byte of the two length fields on the CRC of the headers, by family, field, and place of the byte. */
static uint32_t length_effects[2][2][2][256];
/* The effect of a byte of the identification, by its place, low byte first. */
static uint32_t identification_effects[2][256];
/* A difference after the headers, a byte at a time, to the identification that causes it: the low half, if the high
 * half is 0. */
static uint32_t solutions[4][256];
/* backwards[k]: x^(-8 * 2^k) modulo the polynomial, to take a difference back by 2^k bytes. */
static uint32_t backwards[16];
/* The effect of byte 4 of the BTH as ones, as a difference before the BTH. */
static uint32_t masked_byte;

/* The product of two polynomials modulo that of the CRC; bit 31 is the coefficient of x^0. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (int i = 0; i < 32; i++) {
        product ^= b & (0 - (a >> 31));
        a <<= 1;
        b = b >> 1 ^ (UINT32_C(0xEDB88320) & (0 - (b & 1)));
    }
    return product;
}

/* Eight bytes of ones, and the IP and UDP headers with ones where routers may change them. Lengths are 0. */
static size_t make_header(uint8_t *header, bool is_ipv6, const uint8_t *source, const uint8_t *destination,
                          uint16_t sport, uint16_t dport) {
    size_t address_length = is_ipv6 ? 16 : 4;
    memset(header, 0, LONGEST_HEADER);
    memset(header, 0xFF, 8);
    uint8_t *ip = header + 8, *udp;
    if (is_ipv6) {
        ip[0] = 0x6F, ip[1] = ip[2] = ip[3] = 0xFF;
        ip[6] = 17, ip[7] = 0xFF;
        memcpy(ip + 8, source, address_length);
        memcpy(ip + 24, destination, address_length);
        udp = ip + 40;
    } else {
        ip[0] = 0x45, ip[1] = 0xFF;
        ip[6] = 0x40; /* don't fragment */
        ip[8] = 0xFF, ip[9] = 17, ip[10] = ip[11] = 0xFF;
        memcpy(ip + 12, source, address_length);
        memcpy(ip + 16, destination, address_length);
        udp = ip + 20;
    }
    udp[0] = (uint8_t)(sport >> 8), udp[1] = (uint8_t)sport;
    udp[2] = (uint8_t)(dport >> 8), udp[3] = (uint8_t)dport;
    udp[6] = udp[7] = 0xFF;
    return is_ipv6 ? IPV6_LENGTH : IPV4_LENGTH;
}

static const uint8_t no_address[16];

/* The effect of the byte at `place` of a header on its CRC. */
static void find_effects(uint32_t effects[256], bool is_ipv6, size_t place) {
    uint8_t header[LONGEST_HEADER];
    size_t size = make_header(header, is_ipv6, no_address, no_address, 0, 0);
    uint8_t before = header[place];
    uint32_t none = rdmacm_crc32(0, header, size);
    for (unsigned value = 0; value < 256; value++) {
        header[place] = (uint8_t)(before ^ value);
        effects[value] = rdmacm_crc32(0, header, size) ^ none;
    }
}

/* The differences of the 16 bits of an identification are extended to a basis of all 32 dimensions. The coordinates of
 * a difference in that basis are the identification, and above it 0 if there is one. */
static void find_solutions(void) {
    uint32_t vectors[32], coordinates[32]; /* the vector with highest bit i; 0: none */
    memset(vectors, 0, sizeof vectors);
    memset(coordinates, 0, sizeof coordinates);
    unsigned count = 0;
    for (unsigned candidate = 0; candidate < 16 + 32 && count < 32; candidate++) {
        uint32_t vector = candidate < 16 ? identification_effects[candidate >> 3][1u << (candidate & 7)]
                                         : UINT32_C(1) << (candidate - 16);
        uint32_t combined = UINT32_C(1) << count;
        for (int bit = 31; bit >= 0; bit--) {
            if (!(vector >> bit & 1))
                continue;
            if (!vectors[bit]) {
                vectors[bit] = vector, coordinates[bit] = combined;
                count++;
                break;
            }
            vector ^= vectors[bit], combined ^= coordinates[bit];
        }
    }
    for (unsigned place = 0; place < 4; place++)
        for (uint32_t value = 0; value < 256; value++) {
            uint32_t vector = value << 8 * place, found = 0;
            for (int bit = 31; bit >= 0; bit--)
                if (vector >> bit & 1)
                    vector ^= vectors[bit], found ^= coordinates[bit];
            solutions[place][value] = found;
        }
}

void rdmacm_icrc_init(void) {
    static const size_t places[2][2] = {{8 + 2, 8 + 20 + 4}, {8 + 4, 8 + 40 + 4}};
    for (int family = IPV4; family <= IPV6; family++)
        for (int field = 0; field < 2; field++)
            for (size_t byte = 0; byte < 2; byte++)
                find_effects(length_effects[family][field][byte], family == IPV6, places[family][field] + 1 - byte);
    find_effects(identification_effects[0], false, 8 + 5);
    find_effects(identification_effects[1], false, 8 + 4);
    find_solutions();
    /* P = x^32 + ... + 1, so x times (P - 1) / x is 1: that quotient is x^-1. */
    uint32_t power = UINT32_C(0xEDB88320) << 1 | 1;
    for (int i = 0; i < 3; i++)
        power = multiply(power, power);
    for (int k = 0; k < 16; k++) {
        backwards[k] = power;
        power = multiply(power, power);
    }
    /* A byte that is run into the register is exclusive-ored to its low end: at the place of byte 4, four bytes on. */
    masked_byte = multiply(0xFF, backwards[2]);
}

static uint32_t length_effect(bool is_ipv6, size_t length) {
    size_t udp = 8 + length, ip = is_ipv6 ? udp : 20 + udp;
    uint32_t(*effects)[2][256] = length_effects[is_ipv6];
    return effects[0][0][ip & 0xFF] ^ effects[0][1][ip >> 8 & 0xFF] ^ effects[1][0][udp & 0xFF] ^
           effects[1][1][udp >> 8 & 0xFF];
}

void rdmacm_flow_init(struct rdmacm_flow *flow, const uint8_t *source, const uint8_t *destination,
                      size_t address_length, uint16_t sport, uint16_t dport) {
    uint8_t header[LONGEST_HEADER];
    flow->is_ipv6 = address_length == 16;
    size_t size = make_header(header, flow->is_ipv6, source, destination, sport, dport);
    flow->base = rdmacm_crc32(0, header, size) ^ masked_byte;
}

uint32_t rdmacm_flow_start(const struct rdmacm_flow *flow, size_t length, uint16_t identification) {
    uint32_t start = flow->base ^ length_effect(flow->is_ipv6, length);
    if (identification && !flow->is_ipv6)
        start ^= identification_effects[0][identification & 0xFF] ^ identification_effects[1][identification >> 8];
    return start;
}

int32_t rdmacm_flow_identify(const struct rdmacm_flow *flow, const uint8_t *data, size_t size, uint16_t guess) {
    static const uint8_t masked = 0;
    uint32_t crc = rdmacm_flow_start(flow, size, guess);
    if (!data[4] && data[0] != RDMACM_FLUSH)
        return rdmacm_flow_solve(flow, rdmacm_crc32(crc, data, size), size, guess);
    /* Byte 4 counts as ones, which the start has for 0; only FECN, BECN and the bits after them give it another value. */
    size_t covered = size - RDMACM_ICRC_LENGTH;
    crc = rdmacm_crc32(rdmacm_crc32(crc, data, 4), &masked, 1);
    crc = rdmacm_crc32(crc, data + 5, covered - 5);
    int32_t found = rdmacm_flow_solve(flow, rdmacm_crc32(crc, data + covered, RDMACM_ICRC_LENGTH), size, guess);
    if (found >= 0 || data[0] != RDMACM_FLUSH)
        return found;
    /* rxe runs its CRC over the packet twice, the second time without the mask. */
    return rdmacm_flow_solve(flow, rdmacm_crc32(crc, data, size), 2 * size - RDMACM_ICRC_LENGTH, guess);
}

int32_t rdmacm_flow_solve(const struct rdmacm_flow *flow, uint32_t crc, size_t length, uint16_t guess) {
    if (crc == RDMACM_RESIDUE)
        return guess;
    if (flow->is_ipv6 || length > 0xFFFF)
        return -1;
    uint32_t difference = crc ^ RDMACM_RESIDUE;
    for (int k = 0; length; k++, length >>= 1)
        if (length & 1)
            difference = multiply(difference, backwards[k]);
    uint32_t found = solutions[0][difference & 0xFF] ^ solutions[1][difference >> 8 & 0xFF] ^
                     solutions[2][difference >> 16 & 0xFF] ^ solutions[3][difference >> 24];
    return found < 1u << 16 ? (int32_t)(guess ^ found) : -1;
}
