/* crypto ALGORITHM TIMES: has OpenSSL do that many operations, and checks what they give. A cipher's or a hash's operation is of 1 MiB. */
#include <openssl/bn.h>
#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/param_build.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MIB (1 << 20)

static void need(int right, const char *what)
{
    if (!right) {
        fprintf(stderr, "crypto: %s\n", what);
        exit(1);
    }
}

/* A key that takes no time to find: its primes are the two greatest of 1024 bits. */
static EVP_PKEY *rsa_key(void)
{
    static const char *const names[] = {
        OSSL_PKEY_PARAM_RSA_N,         OSSL_PKEY_PARAM_RSA_E,         OSSL_PKEY_PARAM_RSA_D,           OSSL_PKEY_PARAM_RSA_FACTOR1,
        OSSL_PKEY_PARAM_RSA_FACTOR2,   OSSL_PKEY_PARAM_RSA_EXPONENT1, OSSL_PKEY_PARAM_RSA_EXPONENT2,   OSSL_PKEY_PARAM_RSA_COEFFICIENT1,
    };
    enum { N, E, D, P, Q, DP, DQ, QINV, NUMBERS };
    BN_CTX *context = BN_CTX_new();
    BIGNUM *p1 = BN_new(), *q1 = BN_new(), *phi = BN_new(), *number[NUMBERS];
    OSSL_PARAM_BLD *build = OSSL_PARAM_BLD_new();
    EVP_PKEY_CTX *maker = EVP_PKEY_CTX_new_from_name(NULL, "RSA", NULL);
    EVP_PKEY *key = NULL;
    int right = 1;

    for (int i = 0; i < NUMBERS; i++)
        number[i] = BN_new();
    BN_set_bit(number[P], 1024);
    BN_copy(number[Q], number[P]);
    BN_sub_word(number[P], 105);
    BN_sub_word(number[Q], 179);
    BN_set_word(number[E], 65537);
    BN_mul(number[N], number[P], number[Q], context);
    BN_sub(p1, number[P], BN_value_one());
    BN_sub(q1, number[Q], BN_value_one());
    BN_mul(phi, p1, q1, context);
    right &= BN_mod_inverse(number[D], number[E], phi, context) != NULL;
    BN_mod(number[DP], number[D], p1, context);
    BN_mod(number[DQ], number[D], q1, context);
    right &= BN_mod_inverse(number[QINV], number[Q], number[P], context) != NULL;
    for (int i = 0; i < NUMBERS; i++)
        right &= OSSL_PARAM_BLD_push_BN(build, names[i], number[i]);
    right &= EVP_PKEY_fromdata_init(maker) == 1;
    right &= EVP_PKEY_fromdata(maker, &key, EVP_PKEY_KEYPAIR, OSSL_PARAM_BLD_to_param(build)) == 1;
    need(right, "no RSA key");
    return key;
}

/* Signs and verifies. */
static void sign(EVP_PKEY *key, long times)
{
    unsigned char digest[32] = "what is signed", signature[256];
    EVP_PKEY_CTX *signer = EVP_PKEY_CTX_new(key, NULL), *verifier = EVP_PKEY_CTX_new(key, NULL);

    need(EVP_PKEY_sign_init(signer) == 1 && EVP_PKEY_verify_init(verifier) == 1, "no signature");
    while (times-- > 0) {
        size_t size = sizeof signature;

        digest[31]++;
        need(EVP_PKEY_sign(signer, signature, &size, digest, sizeof digest) == 1, "no signature");
        need(EVP_PKEY_verify(verifier, signature, size, digest, sizeof digest) == 1, "a wrong signature");
    }
}

/* Agrees on a secret, from both sides. */
static void agree(long times)
{
    EVP_PKEY *key[2] = {EVP_PKEY_Q_keygen(NULL, NULL, "X25519"), EVP_PKEY_Q_keygen(NULL, NULL, "X25519")};
    unsigned char secret[2][32];

    while (times-- > 0) {
        for (int side = 0; side < 2; side++) {
            EVP_PKEY_CTX *context = EVP_PKEY_CTX_new(key[side], NULL);
            size_t size = sizeof secret[side];

            need(EVP_PKEY_derive_init(context) == 1 && EVP_PKEY_derive_set_peer(context, key[!side]) == 1 &&
                     EVP_PKEY_derive(context, secret[side], &size) == 1,
                 "no secret");
            EVP_PKEY_CTX_free(context);
        }
        need(memcmp(secret[0], secret[1], sizeof secret[0]) == 0, "two secrets");
    }
}

/* Encrypts, and at the end decrypts once; the tag says whether that is right. */
static void encrypt(const EVP_CIPHER *cipher, long times)
{
    static unsigned char plain[MIB], secret[MIB], again[MIB];
    const unsigned char key[32] = "a key of thirty-two bytes, or so", nonce[12] = "and a nonce";
    unsigned char tag[16];
    EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
    int size, right = 1;

    while (times-- > 0) {
        plain[0]++;
        right &= EVP_EncryptInit_ex2(context, cipher, key, nonce, NULL);
        right &= EVP_EncryptUpdate(context, secret, &size, plain, MIB);
        right &= EVP_EncryptFinal_ex(context, secret, &size);
    }
    right &= EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, sizeof tag, tag);
    right &= EVP_DecryptInit_ex2(context, cipher, key, nonce, NULL);
    right &= EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, sizeof tag, tag);
    right &= EVP_DecryptUpdate(context, again, &size, secret, MIB);
    right &= EVP_DecryptFinal_ex(context, again, &size);
    need(right == 1 && memcmp(plain, again, MIB) == 0, "another text");
}

/* Hashes zeroes. The first byte of the hash of one MiB of them is 0x30. */
static void hash(long times)
{
    static const unsigned char zeroes[MIB];
    unsigned char digest[32];

    while (times-- > 0)
        need(EVP_Digest(zeroes, MIB, digest, NULL, EVP_sha256(), NULL) == 1 && digest[0] == 0x30, "a wrong hash");
}

int main(int argc, char **argv)
{
    const char *name = argc == 3 ? argv[1] : "";
    long times = argc == 3 ? atol(argv[2]) : 0;

    if (!strcmp(name, "ecdsa-p256"))
        sign(EVP_PKEY_Q_keygen(NULL, NULL, "EC", "P-256"), times);
    else if (!strcmp(name, "rsa-2048"))
        sign(rsa_key(), times);
    else if (!strcmp(name, "x25519"))
        agree(times);
    else if (!strcmp(name, "aes-256-gcm"))
        encrypt(EVP_aes_256_gcm(), times);
    else if (!strcmp(name, "chacha20-poly1305"))
        encrypt(EVP_chacha20_poly1305(), times);
    else if (!strcmp(name, "sha-256"))
        hash(times);
    else
        need(0, "wants ALGORITHM TIMES");
    return 0;
}
