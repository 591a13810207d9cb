/* Writes the method of rdmacm_crc32; then, for each record of the input (start, length, bytes), both CRC-32s of it. */
#include "rdmacm_core.h"

#include <stdio.h>

static unsigned char data[1 << 20];

int main(void) {
    uint32_t head[2]; /* start, length */
    rdmacm_crc32_init();
    puts(rdmacm_crc32_method());
    while (fread(head, sizeof head, 1, stdin) == 1 && head[1] < sizeof data - 16) {
        /* Not always aligned. */
        unsigned char *at = data + head[1] % 16;
        if (fread(at, 1, head[1], stdin) != head[1])
            return 1;
        printf("%08x %08x\n", rdmacm_crc32(head[0], at, head[1]), rdmacm_crc32_by_table(head[0], at, head[1]));
    }
    return 0;
}
