/*
 * spoof.c - what a program in a sandbox may try with its network; harmless.
 *
 *   spoof udp SOURCE DESTINATION PORT    a DNS query for spoofed.test from an address of its choice
 *   spoof raw                            a raw socket (ICMP)
 *   spoof packet                         a packet socket (ARP)
 *
 * Prints "ok" or the name of the errno with which it failed.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

static const unsigned char QUERY[] = "\x12\x34\x01\0\0\1\0\0\0\0\0\0\7spoofed\4test\0\0\1\0\1";

static int say(int result) {
    puts(result < 0 ? strerrorname_np(errno) : "ok");
    return 0;
}

static struct sockaddr_in address(const char *text, int port) {
    struct sockaddr_in found = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, text, &found.sin_addr);
    return found;
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "raw"))
        return say(socket(AF_INET, SOCK_RAW, IPPROTO_ICMP));
    if (argc == 2 && !strcmp(argv[1], "packet"))
        return say(socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ARP)));
    if (argc != 5)
        return 2;
    struct sockaddr_in source = address(argv[2], 0), to = address(argv[3], atoi(argv[4]));
    int fd = socket(AF_INET, SOCK_DGRAM, 0), one = 1;
    /* Needs no privilege: an address that is nobody's here may be bound. */
    if (setsockopt(fd, IPPROTO_IP, IP_FREEBIND, &one, sizeof one) ||
        bind(fd, (struct sockaddr *)&source, sizeof source))
        return say(-1);
    return say(sendto(fd, QUERY, sizeof QUERY - 1, 0, (struct sockaddr *)&to, sizeof to));
}
