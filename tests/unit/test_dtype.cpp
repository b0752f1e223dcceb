// SPDX-License-Identifier: Apache-2.0
// Every code, every tie and every overflow threshold of src/dtype.h, against an
// oracle written another way (a search in a sorted table of decoded values), the
// compiler's and the machine's half precision, and values recorded from ml_dtypes.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include "dtype.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define CQSA_TEST_F16C 1
#endif

namespace {

using namespace cqsa;

constexpr float f32_inf = std::numeric_limits<float>::infinity();
constexpr float f32_nan = std::numeric_limits<float>::quiet_NaN();

float f32(std::uint32_t b) { return std::bit_cast<float>(b); }
double f64(std::uint64_t b) { return std::bit_cast<double>(b); }
std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

// Mismatches are counted and the first one shown: one assertion per value would
// make Catch2 the slow part by far.
struct tally {
    long long checked = 0, bad = 0;
    std::string first;
    template <class In, class A, class B> void expect(In in, A got, B want) {
        ++checked;
        if (got == want) return;
        if (bad++ == 0) {
            std::ostringstream s;
            s << std::hex << "input 0x" << std::uint64_t(in) << ": got 0x" << std::uint64_t(got)
              << ", want 0x" << std::uint64_t(want);
            first = s.str();
        }
    }
};
#define REQUIRE_CLEAN(t)                                            \
    do {                                                            \
        INFO((t).first << " (" << (t).bad << " of " << (t).checked << " wrong)"); \
        CHECK((t).checked > 0);                                     \
        CHECK((t).bad == 0);                                        \
    } while (0)

struct golden {
    std::uint32_t f32_bits;
    std::uint16_t code;
};

// Produced once with ml_dtypes 0.6.0 (f16: numpy 2.4.6), which does not saturate.
// clang-format off
const golden g_f16[] = {
    {0x477FE000, 0x7BFF}, {0x477FDFFF, 0x7BFF}, {0xC77FE001, 0xFBFF}, {0x477FF000, 0x7C00},
    {0x477FEFFF, 0x7BFF}, {0xC77FF001, 0xFC00}, {0x47800000, 0x7C00}, {0x477FFFFF, 0x7C00},
    {0xC7800001, 0xFC00}, {0x33800000, 0x0001}, {0x337FFFFF, 0x0001}, {0xB3800001, 0x8001},
    {0x33000000, 0x0000}, {0x32FFFFFF, 0x0000}, {0xB3000001, 0x8001}, {0x33C00000, 0x0002},
    {0x33BFFFFF, 0x0001}, {0xB3C00001, 0x8002}, {0x34200000, 0x0002}, {0x341FFFFF, 0x0002},
    {0xB4200001, 0x8003}, {0x38800000, 0x0400}, {0x387FFFFF, 0x0400}, {0xB8800001, 0x8400},
    {0x387FE000, 0x0400}, {0x387FDFFF, 0x03FF}, {0xB87FE001, 0x8400}, {0x387FC000, 0x03FF},
    {0x387FBFFF, 0x03FF}, {0xB87FC001, 0x83FF}, {0x38801000, 0x0400}, {0x38800FFF, 0x0400},
    {0xB8801001, 0x8401}, {0x3F801000, 0x3C00}, {0x3F800FFF, 0x3C00}, {0xBF801001, 0xBC01},
    {0x3F803000, 0x3C02}, {0x3F802FFF, 0x3C01}, {0xBF803001, 0xBC02}, {0x3FFFF000, 0x4000},
    {0x3FFFEFFF, 0x3FFF}, {0xBFFFF001, 0xC000}, {0x46A53000, 0x752A}, {0x46A52FFF, 0x7529},
    {0xC6A53001, 0xF52A}, {0x41B05000, 0x4D82}, {0x41B04FFF, 0x4D82}, {0xC1B05001, 0xCD83},
    {0x429AB000, 0x54D6}, {0x429AAFFF, 0x54D5}, {0xC29AB001, 0xD4D6}, {0x45E7F000, 0x6F40},
    {0x45E7EFFF, 0x6F3F}, {0xC5E7F001, 0xEF40}, {0x00000000, 0x0000}, {0x80000000, 0x8000},
    {0x7F800000, 0x7C00}, {0xFF800000, 0xFC00}, {0x7FC00000, 0x7E00}, {0xFFC00000, 0xFE00},
    {0x00000001, 0x0000}, {0x80000001, 0x8000}, {0x7F7FFFFF, 0x7C00}, {0xFF7FFFFF, 0xFC00},
};
const golden g_bf16[] = {
    {0x7F7F0000, 0x7F7F}, {0x7F7EFFFF, 0x7F7F}, {0xFF7F0001, 0xFF7F}, {0x7F7F8000, 0x7F80},
    {0x7F7F7FFF, 0x7F7F}, {0xFF7F8001, 0xFF80}, {0x7F800000, 0x7F80}, {0x7F7FFFFF, 0x7F80},
    {0xFF800000, 0xFF80}, {0x00010000, 0x0001}, {0x0000FFFF, 0x0001}, {0x80010001, 0x8001},
    {0x00008000, 0x0000}, {0x00007FFF, 0x0000}, {0x80008001, 0x8001}, {0x00018000, 0x0002},
    {0x00017FFF, 0x0001}, {0x80018001, 0x8002}, {0x00028000, 0x0002}, {0x00027FFF, 0x0002},
    {0x80028001, 0x8003}, {0x00800000, 0x0080}, {0x007FFFFF, 0x0080}, {0x80800001, 0x8080},
    {0x007F8000, 0x0080}, {0x007F7FFF, 0x007F}, {0x807F8001, 0x8080}, {0x007F0000, 0x007F},
    {0x007EFFFF, 0x007F}, {0x807F0001, 0x807F}, {0x00808000, 0x0080}, {0x00807FFF, 0x0080},
    {0x80808001, 0x8081}, {0x3F808000, 0x3F80}, {0x3F807FFF, 0x3F80}, {0xBF808001, 0xBF81},
    {0x3F818000, 0x3F82}, {0x3F817FFF, 0x3F81}, {0xBF818001, 0xBF82}, {0x3FFF8000, 0x4000},
    {0x3FFF7FFF, 0x3FFF}, {0xBFFF8001, 0xC000}, {0x49BB8000, 0x49BC}, {0x49BB7FFF, 0x49BB},
    {0xC9BB8001, 0xC9BC}, {0x62E58000, 0x62E6}, {0x62E57FFF, 0x62E5}, {0xE2E58001, 0xE2E6},
    {0x6A498000, 0x6A4A}, {0x6A497FFF, 0x6A49}, {0xEA498001, 0xEA4A}, {0x1CB78000, 0x1CB8},
    {0x1CB77FFF, 0x1CB7}, {0x9CB78001, 0x9CB8}, {0x00000000, 0x0000}, {0x80000000, 0x8000},
    {0x7F800000, 0x7F80}, {0xFF800000, 0xFF80}, {0x7FC00000, 0x7FC0}, {0xFFC00000, 0xFFC0},
    {0x00000001, 0x0000}, {0x80000001, 0x8000}, {0x7F7FFFFF, 0x7F80}, {0xFF7FFFFF, 0xFF80},
};
const golden g_e4m3fn[] = {
    {0x43E00000, 0x7E}, {0x43DFFFFF, 0x7E}, {0xC3E00001, 0xFE}, {0x43E80000, 0x7E},
    {0x43E7FFFF, 0x7E}, {0xC3E80001, 0xFF}, {0x43F00000, 0x7F}, {0x43EFFFFF, 0x7F},
    {0xC3F00001, 0xFF}, {0x3B000000, 0x01}, {0x3AFFFFFF, 0x01}, {0xBB000001, 0x81},
    {0x3A800000, 0x00}, {0x3A7FFFFF, 0x00}, {0xBA800001, 0x81}, {0x3B400000, 0x02},
    {0x3B3FFFFF, 0x01}, {0xBB400001, 0x82}, {0x3BA00000, 0x02}, {0x3B9FFFFF, 0x02},
    {0xBBA00001, 0x83}, {0x3C800000, 0x08}, {0x3C7FFFFF, 0x08}, {0xBC800001, 0x88},
    {0x3C700000, 0x08}, {0x3C6FFFFF, 0x07}, {0xBC700001, 0x88}, {0x3C600000, 0x07},
    {0x3C5FFFFF, 0x07}, {0xBC600001, 0x87}, {0x3C880000, 0x08}, {0x3C87FFFF, 0x08},
    {0xBC880001, 0x89}, {0x3F880000, 0x38}, {0x3F87FFFF, 0x38}, {0xBF880001, 0xB9},
    {0x3F980000, 0x3A}, {0x3F97FFFF, 0x39}, {0xBF980001, 0xBA}, {0x3FF80000, 0x40},
    {0x3FF7FFFF, 0x3F}, {0xBFF80001, 0xC0}, {0x3C880000, 0x08}, {0x3C87FFFF, 0x08},
    {0xBC880001, 0x89}, {0x3E680000, 0x26}, {0x3E67FFFF, 0x26}, {0xBE680001, 0xA7},
    {0x3E580000, 0x26}, {0x3E57FFFF, 0x25}, {0xBE580001, 0xA6}, {0x42D80000, 0x6E},
    {0x42D7FFFF, 0x6D}, {0xC2D80001, 0xEE}, {0x00000000, 0x00}, {0x80000000, 0x80},
    {0x7F800000, 0x7F}, {0xFF800000, 0xFF}, {0x7FC00000, 0x7F}, {0xFFC00000, 0xFF},
    {0x00000001, 0x00}, {0x80000001, 0x80}, {0x7F7FFFFF, 0x7F}, {0xFF7FFFFF, 0xFF},
};
const golden g_e5m2[] = {
    {0x47600000, 0x7B}, {0x475FFFFF, 0x7B}, {0xC7600001, 0xFB}, {0x47700000, 0x7C},
    {0x476FFFFF, 0x7B}, {0xC7700001, 0xFC}, {0x47800000, 0x7C}, {0x477FFFFF, 0x7C},
    {0xC7800001, 0xFC}, {0x37800000, 0x01}, {0x377FFFFF, 0x01}, {0xB7800001, 0x81},
    {0x37000000, 0x00}, {0x36FFFFFF, 0x00}, {0xB7000001, 0x81}, {0x37C00000, 0x02},
    {0x37BFFFFF, 0x01}, {0xB7C00001, 0x82}, {0x38200000, 0x02}, {0x381FFFFF, 0x02},
    {0xB8200001, 0x83}, {0x38800000, 0x04}, {0x387FFFFF, 0x04}, {0xB8800001, 0x84},
    {0x38600000, 0x04}, {0x385FFFFF, 0x03}, {0xB8600001, 0x84}, {0x38400000, 0x03},
    {0x383FFFFF, 0x03}, {0xB8400001, 0x83}, {0x38900000, 0x04}, {0x388FFFFF, 0x04},
    {0xB8900001, 0x85}, {0x3F900000, 0x3C}, {0x3F8FFFFF, 0x3C}, {0xBF900001, 0xBD},
    {0x3FB00000, 0x3E}, {0x3FAFFFFF, 0x3D}, {0xBFB00001, 0xBE}, {0x3FF00000, 0x40},
    {0x3FEFFFFF, 0x3F}, {0xBFF00001, 0xC0}, {0x45F00000, 0x70}, {0x45EFFFFF, 0x6F},
    {0xC5F00001, 0xF0}, {0x38200000, 0x02}, {0x381FFFFF, 0x02}, {0xB8200001, 0x83},
    {0x3FB00000, 0x3E}, {0x3FAFFFFF, 0x3D}, {0xBFB00001, 0xBE}, {0x44900000, 0x64},
    {0x448FFFFF, 0x64}, {0xC4900001, 0xE5}, {0x00000000, 0x00}, {0x80000000, 0x80},
    {0x7F800000, 0x7C}, {0xFF800000, 0xFC}, {0x7FC00000, 0x7E}, {0xFFC00000, 0xFE},
    {0x00000001, 0x00}, {0x80000001, 0x80}, {0x7F7FFFFF, 0x7C}, {0xFF7FFFFF, 0xFC},
};
const golden g_e4m3fnuz[] = {
    {0x43700000, 0x7F}, {0x436FFFFF, 0x7F}, {0xC3700001, 0xFF}, {0x43780000, 0x80},
    {0x4377FFFF, 0x7F}, {0xC3780001, 0x80}, {0x43800000, 0x80}, {0x437FFFFF, 0x80},
    {0xC3800001, 0x80}, {0x3A800000, 0x01}, {0x3A7FFFFF, 0x01}, {0xBA800001, 0x81},
    {0x3A000000, 0x00}, {0x39FFFFFF, 0x00}, {0xBA000001, 0x81}, {0x3AC00000, 0x02},
    {0x3ABFFFFF, 0x01}, {0xBAC00001, 0x82}, {0x3B200000, 0x02}, {0x3B1FFFFF, 0x02},
    {0xBB200001, 0x83}, {0x3C000000, 0x08}, {0x3BFFFFFF, 0x08}, {0xBC000001, 0x88},
    {0x3BF00000, 0x08}, {0x3BEFFFFF, 0x07}, {0xBBF00001, 0x88}, {0x3BE00000, 0x07},
    {0x3BDFFFFF, 0x07}, {0xBBE00001, 0x87}, {0x3C080000, 0x08}, {0x3C07FFFF, 0x08},
    {0xBC080001, 0x89}, {0x3F880000, 0x40}, {0x3F87FFFF, 0x40}, {0xBF880001, 0xC1},
    {0x3F980000, 0x42}, {0x3F97FFFF, 0x41}, {0xBF980001, 0xC2}, {0x3FF80000, 0x48},
    {0x3FF7FFFF, 0x47}, {0xBFF80001, 0xC8}, {0x3CA80000, 0x12}, {0x3CA7FFFF, 0x12},
    {0xBCA80001, 0x93}, {0x41C80000, 0x64}, {0x41C7FFFF, 0x64}, {0xC1C80001, 0xE5},
    {0x3C880000, 0x10}, {0x3C87FFFF, 0x10}, {0xBC880001, 0x91}, {0x3F480000, 0x3C},
    {0x3F47FFFF, 0x3C}, {0xBF480001, 0xBD}, {0x00000000, 0x00}, {0x80000000, 0x00},
    {0x7F800000, 0x80}, {0xFF800000, 0x80}, {0x7FC00000, 0x80}, {0xFFC00000, 0x80},
    {0x00000001, 0x00}, {0x80000001, 0x00}, {0x7F7FFFFF, 0x80}, {0xFF7FFFFF, 0x80},
};
const golden g_e5m2fnuz[] = {
    {0x47600000, 0x7F}, {0x475FFFFF, 0x7F}, {0xC7600001, 0xFF}, {0x47700000, 0x80},
    {0x476FFFFF, 0x7F}, {0xC7700001, 0x80}, {0x47800000, 0x80}, {0x477FFFFF, 0x80},
    {0xC7800001, 0x80}, {0x37000000, 0x01}, {0x36FFFFFF, 0x01}, {0xB7000001, 0x81},
    {0x36800000, 0x00}, {0x367FFFFF, 0x00}, {0xB6800001, 0x81}, {0x37400000, 0x02},
    {0x373FFFFF, 0x01}, {0xB7400001, 0x82}, {0x37A00000, 0x02}, {0x379FFFFF, 0x02},
    {0xB7A00001, 0x83}, {0x38000000, 0x04}, {0x37FFFFFF, 0x04}, {0xB8000001, 0x84},
    {0x37E00000, 0x04}, {0x37DFFFFF, 0x03}, {0xB7E00001, 0x84}, {0x37C00000, 0x03},
    {0x37BFFFFF, 0x03}, {0xB7C00001, 0x83}, {0x38100000, 0x04}, {0x380FFFFF, 0x04},
    {0xB8100001, 0x85}, {0x3F900000, 0x40}, {0x3F8FFFFF, 0x40}, {0xBF900001, 0xC1},
    {0x3FB00000, 0x42}, {0x3FAFFFFF, 0x41}, {0xBFB00001, 0xC2}, {0x3FF00000, 0x44},
    {0x3FEFFFFF, 0x43}, {0xBFF00001, 0xC4}, {0x44700000, 0x68}, {0x446FFFFF, 0x67},
    {0xC4700001, 0xE8}, {0x3C700000, 0x28}, {0x3C6FFFFF, 0x27}, {0xBC700001, 0xA8},
    {0x3D100000, 0x2C}, {0x3D0FFFFF, 0x2C}, {0xBD100001, 0xAD}, {0x3C100000, 0x24},
    {0x3C0FFFFF, 0x24}, {0xBC100001, 0xA5}, {0x00000000, 0x00}, {0x80000000, 0x00},
    {0x7F800000, 0x80}, {0xFF800000, 0x80}, {0x7FC00000, 0x80}, {0xFFC00000, 0x80},
    {0x00000001, 0x00}, {0x80000001, 0x00}, {0x7F7FFFFF, 0x80}, {0xFF7FFFFF, 0x80},
};
// Without zero, finite values from 1.5 * 2^127 and those between 2^-127 and 1.5 * 2^-127,
// where dtype.h differs on purpose (see there).
const golden g_e8m0fnu_nearest[] = {
    {0x3F800000, 0x7F}, {0x3FC00000, 0x80}, {0x3F400000, 0x7F}, {0x3F333333, 0x7E},
    {0x40400000, 0x81}, {0x40C00000, 0x82}, {0x40401062, 0x81}, {0x7F000000, 0xFE},
    {0x7F3EB852, 0xFE}, {0x00400000, 0x00}, {0x00200000, 0x00}, {0x00600000, 0x01},
    {0x00800000, 0x01}, {0x00000001, 0x00}, {0xBF800000, 0xFF},
    {0x7F800000, 0xFF}, {0xFF800000, 0xFF}, {0x7FC00000, 0xFF}, {0x43E00000, 0x88},
};
// clang-format on

// One format, described by its definition only; nothing from dtype.h but the entry points.
struct format {
    const char* name;
    int exp_bits, mant_bits, bias;
    enum { ieee, fn, fnuz } kind;
    float (*to_f32)(unsigned);
    unsigned (*from_f32)(float, bool);
    unsigned (*from_f64)(double);   // null where there is none
    double (*to_f64)(unsigned);     // likewise
    bool has_saturate;
    const golden* gold;
    unsigned last_code;             // the last finite code, written down by hand
    double max;                     // its value, likewise

    unsigned codes() const { return 2u << (exp_bits + mant_bits); }
    unsigned sign() const { return 1u << (exp_bits + mant_bits); }
};

const format formats[] = {
    {"f16", 5, 10, 15, format::ieee, [](unsigned c) { return f16_to_f32(std::uint16_t(c)); },
     [](float x, bool) { return unsigned(f32_to_f16(x)); },
     [](double x) { return unsigned(f64_to_f16(x)); },
     [](unsigned c) { return f16_to_f64(std::uint16_t(c)); }, false, g_f16, 0x7BFF, 65504.0},
    {"bf16", 8, 7, 127, format::ieee, [](unsigned c) { return bf16_to_f32(std::uint16_t(c)); },
     [](float x, bool) { return unsigned(f32_to_bf16(x)); },
     [](double x) { return unsigned(f64_to_bf16(x)); },
     [](unsigned c) { return bf16_to_f64(std::uint16_t(c)); }, false, g_bf16, 0x7F7F, 0x1.FEp127},
    {"e4m3fn", 4, 3, 7, format::fn, [](unsigned c) { return e4m3fn_to_f32(std::uint8_t(c)); },
     [](float x, bool s) { return unsigned(f32_to_e4m3fn(x, s)); }, nullptr, nullptr, true,
     g_e4m3fn, 0x7E, 448.0},
    {"e5m2", 5, 2, 15, format::ieee, [](unsigned c) { return e5m2_to_f32(std::uint8_t(c)); },
     [](float x, bool s) { return unsigned(f32_to_e5m2(x, s)); }, nullptr, nullptr, true,
     g_e5m2, 0x7B, 57344.0},
    {"e4m3fnuz", 4, 3, 8, format::fnuz, [](unsigned c) { return e4m3fnuz_to_f32(std::uint8_t(c)); },
     [](float x, bool s) { return unsigned(f32_to_e4m3fnuz(x, s)); }, nullptr, nullptr, true,
     g_e4m3fnuz, 0x7F, 240.0},
    {"e5m2fnuz", 5, 2, 16, format::fnuz, [](unsigned c) { return e5m2fnuz_to_f32(std::uint8_t(c)); },
     [](float x, bool s) { return unsigned(f32_to_e5m2fnuz(x, s)); }, nullptr, nullptr, true,
     g_e5m2fnuz, 0x7F, 57344.0},
};

// The oracle: values[c] is the non-negative code c as a double, from the definition;
// one more entry stands for the first value out of range. Searching it with
// midpoints (exact in double: at most mant_bits + 2 bits) rounds to nearest even.
struct oracle {
    const format& f;
    std::vector<double> values;

    explicit oracle(const format& fm) : f(fm) {
        for (unsigned c = 0; c <= f.last_code + 1; ++c) {
            const int e = int(c >> f.mant_bits);
            const int m = int(c & ((1u << f.mant_bits) - 1));
            values.push_back(e ? std::ldexp(m + (1 << f.mant_bits), e - f.bias - f.mant_bits)
                               : std::ldexp(m, 1 - f.bias - f.mant_bits));
        }
    }
    double mid(unsigned c) const { return (values[c] + values[c + 1]) / 2; }

    unsigned encode(double x, bool saturate) const {
        const bool neg = std::signbit(x);
        if (f.kind == format::fnuz && std::isnan(x)) return f.sign();
        if (std::isnan(x)) {  // quiet NaN of that sign; float payloads are not used here
            const unsigned nan = f.kind == format::fn ? f.sign() - 1 : ieee_inf() | 1u << (f.mant_bits - 1);
            return nan | (neg ? f.sign() : 0);
        }
        const double a = std::fabs(x);
        // lo: the largest entry not above a.
        const auto up = std::upper_bound(values.begin(), values.end(), a);
        std::size_t c = std::size_t(up - values.begin()) - 1;
        if (c + 1 < values.size()) {
            const double half_way = mid(unsigned(c));
            if (a > half_way || (a == half_way && c % 2 == 1)) ++c;
        }
        const unsigned s = neg ? f.sign() : 0;
        if (c + 1 == values.size()) {
            if (saturate) return s | f.last_code;
            if (f.kind == format::ieee) return s | ieee_inf();
            return f.kind == format::fn ? s | (f.sign() - 1) : f.sign();
        }
        if (c == 0 && f.kind == format::fnuz) return 0;
        return s | unsigned(c);
    }
    unsigned ieee_inf() const { return ((1u << f.exp_bits) - 1) << f.mant_bits; }
};

void expect_f32(tally& t, const oracle& o, float x) {
    const format& f = o.f;
    t.expect(bits(x), f.from_f32(x, false), o.encode(x, false));
    if (f.has_saturate) t.expect(bits(x), f.from_f32(x, true), o.encode(x, true));
    if (f.from_f64) t.expect(bits(x), f.from_f64(x), o.encode(x, false));
}

void expect_f64(tally& t, const oracle& o, double x) {
    t.expect(std::bit_cast<std::uint64_t>(x), o.f.from_f64(x), o.encode(x, false));
}

}  // namespace

TEST_CASE("dtype: conversions are constexpr", "[dtype]") {
    static_assert(f32_to_f16(1.0f) == 0x3C00 && f16_to_f32(0x3C00) == 1.0f);
    static_assert(f64_to_f16(1.0) == 0x3C00 && f16_to_f64(0x0001) == 0x1p-24);
    static_assert(f32_to_bf16(-2.0f) == 0xC000 && bf16_to_f32(0x0001) == 0x1p-133f);
    static_assert(f64_to_bf16(1.0) == 0x3F80 && f64_to_f32(0.5) == 0.5f);
    static_assert(f32_to_e4m3fn(448.0f) == 0x7E && e4m3fn_to_f32(0x01) == 0x1p-9f);
    static_assert(f32_to_e5m2(1.0f) == 0x3C && e5m2_to_f32(0x01) == 0x1p-16f);
    static_assert(f32_to_e4m3fnuz(1.0f) == 0x40 && e4m3fnuz_to_f32(0x01) == 0x1p-10f);
    static_assert(f32_to_e5m2fnuz(1.0f) == 0x40 && e5m2fnuz_to_f32(0x01) == 0x1p-17f);
    static_assert(f32_to_e8m0fnu(1.0f) == 127 && e8m0fnu_to_f32(0) == 0x1p-127f);
    static_assert(sizeof(float16) == 2 && sizeof(bfloat16) == 2 && sizeof(e4m3fn) == 1 &&
                  sizeof(e5m2) == 1 && sizeof(e4m3fnuz) == 1 && sizeof(e5m2fnuz) == 1 &&
                  sizeof(e8m0fnu) == 1);
    SUCCEED();
}

TEST_CASE("dtype: every code decodes to its definition and round-trips", "[dtype]") {
    for (const format& f : formats) {
        INFO(f.name);
        const oracle o(f);
        CHECK(o.values[f.last_code] == f.max);
        tally dec, trip;
        unsigned nans = 0, infs = 0;
        for (unsigned c = 0; c < f.codes(); ++c) {
            const unsigned mag = c & (f.sign() - 1);
            const bool neg = c >= f.sign();
            const float x = f.to_f32(c);
            // A NaN comes back quiet; so does a signalling code.
            unsigned back = c;
            if (f.kind == format::fnuz && c == f.sign()) {
                ++nans;
                dec.expect(c, std::isnan(x), true);
            } else if (mag <= f.last_code) {
                dec.expect(c, bits(x), bits(float(neg ? -o.values[mag] : o.values[mag])));
            } else if (f.kind == format::ieee && mag == o.ieee_inf()) {
                ++infs;
                dec.expect(c, bits(x), bits(neg ? -f32_inf : f32_inf));
            } else {
                ++nans;
                dec.expect(c, std::isnan(x), true);
                dec.expect(c, std::signbit(x), neg);
                dec.expect(c, (bits(x) >> 22) & 1, 1u);
                if (f.kind == format::ieee) back |= 1u << (f.mant_bits - 1);
            }
            const bool inf = std::isinf(x);
            trip.expect(c, f.from_f32(x, false), back);
            if (f.has_saturate)
                trip.expect(c, f.from_f32(x, true), inf ? (c & f.sign()) | f.last_code : back);
            if (f.to_f64) {
                const double d = f.to_f64(c);
                dec.expect(c, std::bit_cast<std::uint64_t>(d), std::bit_cast<std::uint64_t>(double(x)));
                trip.expect(c, f.from_f64(d), back);
            }
        }
        REQUIRE_CLEAN(dec);
        REQUIRE_CLEAN(trip);
        const unsigned want_nans = f.kind == format::fnuz ? 1
                                   : f.kind == format::fn ? 2
                                                          : 2 * ((1u << f.mant_bits) - 1);
        CHECK(nans == want_nans);
        CHECK(infs == (f.kind == format::ieee ? 2u : 0u));
    }
}

TEST_CASE("dtype: ties go to even, their neighbours to the near side", "[dtype]") {
    for (const format& f : formats) {
        INFO(f.name);
        const oracle o(f);
        tally plain, searched, exact;
        for (unsigned c = 0; c <= f.last_code; ++c) {
            const double mid = o.mid(c);
            const float m = float(mid);
            exact.expect(c, double(m) == mid, true);  // every midpoint is a float, bf16's 2^-134 too
            for (unsigned s : {0u, 1u}) {
                const float tie = s ? -m : m;
                const float below = std::nextafterf(tie, 0.0f);
                const float above = std::nextafterf(tie, s ? -f32_inf : f32_inf);
                // Without the oracle: the two codes on either side are known here.
                const auto code = [&](unsigned k) -> unsigned {
                    if (k > f.last_code)
                        return f.kind == format::fnuz ? f.sign() : k | (s ? f.sign() : 0);
                    return k == 0 && f.kind == format::fnuz ? 0u : k | (s ? f.sign() : 0);
                };
                plain.expect(bits(tie), f.from_f32(tie, false), code(c + c % 2));
                plain.expect(bits(below), f.from_f32(below, false), code(c));
                plain.expect(bits(above), f.from_f32(above, false), code(c + 1));
                for (float x : {tie, below, above}) expect_f32(searched, o, x);
                // The double neighbours of a tie round to the tie itself as floats:
                // through float they would all go to even.
                if (f.from_f64) {
                    const double dt = tie;
                    const double db = std::nextafter(dt, 0.0);
                    const double da = std::nextafter(dt, s ? -HUGE_VAL : HUGE_VAL);
                    plain.expect(bits(tie), f.from_f64(dt), code(c + c % 2));
                    plain.expect(bits(tie), f.from_f64(db), code(c));
                    plain.expect(bits(tie), f.from_f64(da), code(c + 1));
                    for (double x : {dt, db, da}) expect_f64(searched, o, x);
                }
            }
        }
        REQUIRE_CLEAN(exact);
        REQUIRE_CLEAN(plain);
        REQUIRE_CLEAN(searched);
    }
}

TEST_CASE("dtype: random values against the table search", "[dtype]") {
    for (const format& f : formats) {
        INFO(f.name);
        const oracle o(f);
        std::mt19937_64 rng(20240607);
        tally t;
        for (int i = 0; i < 1 << 16; ++i) {
            // Any bits, then values log-uniform over the format's range and a bit beyond.
            const float any = f32(std::uint32_t(rng()));
            if (!std::isnan(any)) expect_f32(t, o, any);
            const int lo = 1 - f.bias - f.mant_bits - 3, hi = int(std::ilogb(f.max)) + 3;
            const int e = lo + int(rng() % unsigned(hi - lo));
            double d = std::ldexp(1.0 + double(rng() >> 12) * 0x1p-52, e);
            if (rng() & 1) d = -d;
            expect_f32(t, o, float(d));
            if (f.from_f64) {
                expect_f64(t, o, d);
                const double anyd = f64(rng());
                if (!std::isnan(anyd)) expect_f64(t, o, anyd);
            }
        }
        for (float x : {0.0f, -0.0f, f32_inf, -f32_inf, f32_nan, -f32_nan, f32(1), f32(0x80000001),
                        f32(0x007FFFFF), f32(0x00800000), f32(0x7F7FFFFF), f32(0xFF7FFFFF)})
            expect_f32(t, o, x);
        REQUIRE_CLEAN(t);
    }
}

TEST_CASE("dtype: overflow thresholds", "[dtype]") {
    CHECK(f32_to_f16(65519.996f) == 0x7BFF);
    CHECK(f32_to_f16(65520.0f) == 0x7C00);
    CHECK(f32_to_f16(-65520.0f) == 0xFC00);
    CHECK(f64_to_f16(65519.99999999999) == 0x7BFF);  // as a float this is 65520
    CHECK(f32_to_bf16(f32(0x7F7F7FFF)) == 0x7F7F);
    CHECK(f32_to_bf16(f32(0x7F7F8000)) == 0x7F80);
    CHECK(f64_to_bf16(1e300) == 0x7F80);
    CHECK(f64_to_bf16(-1e300) == 0xFF80);

    CHECK(f32_to_e4m3fn(464.0f, false) == 0x7E);  // the tie goes to the even 448
    CHECK(f32_to_e4m3fn(f32(0x43E80001), false) == 0x7F);
    CHECK(f32_to_e4m3fn(-480.0f, false) == 0xFF);
    CHECK(f32_to_e4m3fn(480.0f) == 0x7E);
    CHECK(f32_to_e4m3fn(-1e30f) == 0xFE);

    CHECK(f32_to_e5m2(f32(0x476FFFFF), false) == 0x7B);
    CHECK(f32_to_e5m2(61440.0f, false) == 0x7C);
    CHECK(f32_to_e5m2(-61440.0f, false) == 0xFC);
    CHECK(f32_to_e5m2(61440.0f) == 0x7B);
    CHECK(f32_to_e5m2(-1e30f) == 0xFB);

    CHECK(f32_to_e4m3fnuz(f32(0x4377FFFF), false) == 0x7F);
    CHECK(f32_to_e4m3fnuz(248.0f, false) == 0x80);
    CHECK(f32_to_e4m3fnuz(-248.0f, false) == 0x80);
    CHECK(f32_to_e4m3fnuz(248.0f) == 0x7F);
    CHECK(f32_to_e4m3fnuz(-1e30f) == 0xFF);

    CHECK(f32_to_e5m2fnuz(f32(0x476FFFFF), false) == 0x7F);
    CHECK(f32_to_e5m2fnuz(61440.0f, false) == 0x80);
    CHECK(f32_to_e5m2fnuz(61440.0f) == 0x7F);
    CHECK(f32_to_e5m2fnuz(-1e30f) == 0xFF);
}

TEST_CASE("dtype: NaN, Inf and zero", "[dtype]") {
    // 16 bits: quiet, sign and leading payload kept, payloads too low to survive still NaN.
    CHECK(f32_to_f16(f32(0x7F800001)) == 0x7E00);
    CHECK(f32_to_f16(f32(0xFF800001)) == 0xFE00);
    CHECK(f32_to_f16(f32(0x7F802000)) == 0x7E01);
    CHECK(f64_to_f16(f64(0xFFF0000000000001)) == 0xFE00);
    CHECK(f32_to_bf16(f32(0x7F800001)) == 0x7FC0);
    CHECK(f32_to_bf16(f32(0xFFFFFFFF)) == 0xFFFF);
    CHECK(f64_to_bf16(f64(0x7FF0000000000001)) == 0x7FC0);
    CHECK(bits(f16_to_f32(0x7C01)) == 0x7FC02000);
    CHECK(bits(bf16_to_f32(0xFF81)) == 0xFFC10000);
    CHECK(std::isnan(f16_to_f64(0xFE00)));

    for (bool sat : {false, true}) {
        CHECK(f32_to_e4m3fn(f32_nan, sat) == 0x7F);
        CHECK(f32_to_e4m3fn(-f32_nan, sat) == 0xFF);
        CHECK(f32_to_e5m2(f32_nan, sat) == 0x7E);
        CHECK(f32_to_e5m2(-f32_nan, sat) == 0xFE);
        CHECK(f32_to_e5m2(f32(0x7F800001), sat) == 0x7E);
        for (float x : {f32_nan, -f32_nan, f32(0x7F800001)}) {
            CHECK(f32_to_e4m3fnuz(x, sat) == 0x80);
            CHECK(f32_to_e5m2fnuz(x, sat) == 0x80);
        }
        CHECK(f32_to_e4m3fn(-0.0f, sat) == 0x80);
        CHECK(f32_to_e5m2(-0.0f, sat) == 0x80);
        for (float x : {-0.0f, -0x1p-149f, -0x1p-18f}) {  // -0x1p-18: e5m2fnuz's tie with zero
            CHECK(f32_to_e4m3fnuz(x, sat) == 0x00);
            CHECK(f32_to_e5m2fnuz(x, sat) == 0x00);
        }
    }
    CHECK(f32_to_e4m3fn(f32_inf) == 0x7E);
    CHECK(f32_to_e4m3fn(-f32_inf) == 0xFE);
    CHECK(f32_to_e4m3fn(f32_inf, false) == 0x7F);
    CHECK(f32_to_e5m2(f32_inf) == 0x7B);
    CHECK(f32_to_e5m2(-f32_inf, false) == 0xFC);
    CHECK(f32_to_e4m3fnuz(-f32_inf) == 0xFF);
    CHECK(f32_to_e4m3fnuz(-f32_inf, false) == 0x80);
    CHECK(f32_to_e5m2fnuz(f32_inf) == 0x7F);
    CHECK(f32_to_e5m2fnuz(f32_inf, false) == 0x80);
    CHECK(f32_to_f16(-0.0f) == 0x8000);
    CHECK(f64_to_f16(-1e-300) == 0x8000);
    CHECK(f64_to_bf16(-0.0) == 0x8000);
    CHECK(bits(f16_to_f32(0x8000)) == 0x80000000u);
    CHECK(bits(e4m3fnuz_to_f32(0)) == 0u);
}

TEST_CASE("dtype: doubles are rounded once", "[dtype]") {
    // 1 + 2^-11 is the tie above 1 in f16; 2^-40 more is lost in float.
    const double x = 1.0 + 0x1p-11 + 0x1p-40;
    CHECK(f64_to_f16(x) == 0x3C01);
    CHECK(f32_to_f16(f64_to_f32(x)) == 0x3C00);
    // From below the odd side: 1 + 3 * 2^-11 ties up to even.
    const double y = 1.0 + 0x3p-11 - 0x1p-40;
    CHECK(f64_to_f16(y) == 0x3C01);
    CHECK(f32_to_f16(f64_to_f32(y)) == 0x3C02);
    const double z = 1.0 + 0x1p-8 + 0x1p-40;
    CHECK(f64_to_bf16(z) == 0x3F81);
    CHECK(f32_to_bf16(f64_to_f32(z)) == 0x3F80);
    // Subnormal results, and below every float: 2^-25 is f16's tie with zero.
    CHECK(f64_to_f16(0x1p-25) == 0x0000);
    CHECK(f64_to_f16(std::nextafter(0x1p-25, 1.0)) == 0x0001);
    CHECK(f64_to_bf16(0x1p-134) == 0x0000);
    CHECK(f64_to_bf16(0x1p-134 + 0x1p-170) == 0x0001);
    CHECK(f64_to_bf16(0x1p-1074) == 0x0000);
    CHECK(f64_to_f16(-0x1p-1074) == 0x8000);
}

TEST_CASE("dtype: f16 agrees with the compiler and the machine", "[dtype]") {
    std::mt19937_64 rng(42);
    [[maybe_unused]] const auto random_f32 = [&rng](int i) {
        const std::uint32_t r = std::uint32_t(rng());
        // Every other value lies within f16's exponents, where most bits are at stake.
        if (i % 2) return f32(r);
        return f32((r & 0x807FFFFF) | (100 + (r >> 23) % 44) << 23);
    };
#ifdef __FLT16_MAX__
    tally enc, enc64, dec;
    for (int i = 0; i < 1 << 20; ++i) {
        const float x = random_f32(i);
        enc.expect(bits(x), f32_to_f16(x), std::bit_cast<std::uint16_t>(_Float16(x)));
        double d = double(x);
        if (!std::isnan(x)) d = f64(std::bit_cast<std::uint64_t>(d) ^ (rng() & 0x1FFFFFFF));
        enc64.expect(std::bit_cast<std::uint64_t>(d), f64_to_f16(d),
                     std::bit_cast<std::uint16_t>(_Float16(d)));
    }
    for (unsigned c = 0; c < 65536; ++c) {
        const _Float16 h = std::bit_cast<_Float16>(std::uint16_t(c));
        dec.expect(c, bits(f16_to_f32(std::uint16_t(c))), bits(float(h)));
        dec.expect(c, std::bit_cast<std::uint64_t>(f16_to_f64(std::uint16_t(c))),
                   std::bit_cast<std::uint64_t>(double(h)));
    }
    REQUIRE_CLEAN(enc);
    REQUIRE_CLEAN(enc64);
    REQUIRE_CLEAN(dec);
#endif
#ifdef CQSA_TEST_F16C
    // The instructions themselves, without asking the whole build for -mf16c.
    // Every AVX2 machine has it; clang 14 cannot be asked for f16c by name.
    if (__builtin_cpu_supports("avx2")) {
        struct hw {
            __attribute__((target("f16c"))) static std::uint16_t enc(float x) {
                return std::uint16_t(_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(x), 0), 0));
            }
            __attribute__((target("f16c"))) static std::uint32_t dec(unsigned c) {
                return std::uint32_t(_mm_cvtsi128_si32(
                    _mm_castps_si128(_mm_cvtph_ps(_mm_cvtsi32_si128(int(c))))));
            }
        };
        tally t;
        for (int i = 0; i < 1 << 20; ++i) {
            const float x = random_f32(i);
            t.expect(bits(x), f32_to_f16(x), hw::enc(x));
        }
        for (unsigned c = 0; c < 65536; ++c) t.expect(c, bits(f16_to_f32(std::uint16_t(c))), hw::dec(c));
        REQUIRE_CLEAN(t);
    }
#endif
    SUCCEED();
}

TEST_CASE("dtype: recorded ml_dtypes results", "[dtype]") {
    for (const format& f : formats) {
        INFO(f.name);
        tally t;
        for (int i = 0; i < 64; ++i)
            t.expect(f.gold[i].f32_bits, f.from_f32(f32(f.gold[i].f32_bits), false), f.gold[i].code);
        REQUIRE_CLEAN(t);
    }
    tally t;
    for (const golden& g : g_e8m0fnu_nearest)
        t.expect(g.f32_bits, f32_to_e8m0fnu_nearest(f32(g.f32_bits)), g.code);
    REQUIRE_CLEAN(t);
}

TEST_CASE("dtype: e8m0fnu", "[dtype]") {
    CHECK(std::isnan(e8m0fnu_to_f32(0xFF)));
    CHECK(f32_to_e8m0fnu(e8m0fnu_to_f32(0xFF)) == 0xFF);
    tally t;
    for (unsigned c = 0; c < 255; ++c) {
        const float x = e8m0fnu_to_f32(std::uint8_t(c));
        t.expect(c, bits(x), bits(float(std::ldexp(1.0, int(c) - 127))));
        const float up = std::nextafterf(x, f32_inf), down = std::nextafterf(x, 0.0f);
        const unsigned next = std::min(c + 1, 254u);
        t.expect(c, f32_to_e8m0fnu(x), c);
        t.expect(c, f32_to_e8m0fnu(up), next);
        t.expect(c, f32_to_e8m0fnu(down), c);
        t.expect(c, f32_to_e8m0fnu_nearest(x), c);
        t.expect(c, f32_to_e8m0fnu_nearest(up), c);
        t.expect(c, f32_to_e8m0fnu_nearest(down), c);
        const float mid = float(std::ldexp(1.5, int(c) - 127));
        t.expect(c, f32_to_e8m0fnu(mid), next);
        t.expect(c, f32_to_e8m0fnu_nearest(mid), next);
        t.expect(c, f32_to_e8m0fnu_nearest(std::nextafterf(mid, 0.0f)), c);
        t.expect(c, f32_to_e8m0fnu_nearest(std::nextafterf(mid, f32_inf)), next);
    }
    // Random positive finite values: the smallest power not below x, by search in doubles.
    std::mt19937 rng(5);
    for (int i = 0; i < 1 << 16; ++i) {
        const std::uint32_t b = i < 1 << 12 ? std::uint32_t(rng()) & 0x00FFFFFF : std::uint32_t(rng()) & 0x7FFFFFFF;
        if (b == 0 || b >= 0x7F800000) continue;
        const double x = f32(b);
        unsigned ceil = 0;
        while (ceil < 254 && std::ldexp(1.0, int(ceil) - 127) < x) ++ceil;
        t.expect(b, f32_to_e8m0fnu(f32(b)), ceil);
    }
    REQUIRE_CLEAN(t);

    for (auto enc : {f32_to_e8m0fnu, f32_to_e8m0fnu_nearest}) {
        CHECK(enc(0.0f) == 0);
        CHECK(enc(-0.0f) == 0);
        CHECK(enc(f32(1)) == 0);
        CHECK(enc(std::numeric_limits<float>::max()) == 0xFE);
        CHECK(enc(f32_inf) == 0xFF);
        CHECK(enc(-f32_inf) == 0xFF);
        CHECK(enc(f32_nan) == 0xFF);
        CHECK(enc(-f32_nan) == 0xFF);
        CHECK(enc(-1.0f) == 0xFF);
        CHECK(enc(-0x1p-149f) == 0xFF);
    }
}
