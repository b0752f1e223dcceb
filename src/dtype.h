// SPDX-License-Identifier: Apache-2.0
// Scalar conversions between float/double and the narrow storage formats.
//
// Everything is integer arithmetic on bit patterns: the result does not depend
// on the rounding mode, on FTZ/DAZ or on -ffast-math, and it is constexpr.
// Rounding is to nearest, ties to even, always in ONE step from the source type
// (f64_to_f16 does not pass through float). e8m0fnu, which has no mantissa to
// be even, has its own rules at the end of the file.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

namespace cqsa {

// Storage types: distinct types for overloads and templates, same layout as
// their bits. The functions below take and give the bare integers.
struct float16 { std::uint16_t bits; };
struct bfloat16 { std::uint16_t bits; };
struct e4m3fn { std::uint8_t bits; };
struct e5m2 { std::uint8_t bits; };
struct e4m3fnuz { std::uint8_t bits; };
struct e5m2fnuz { std::uint8_t bits; };
struct e8m0fnu { std::uint8_t bits; };

namespace detail {

enum class flavour {
    ieee,  // top exponent holds Inf (mantissa 0) and NaN
    fn,    // no Inf; only the all-ones magnitude is NaN, in either sign
    fnuz,  // no Inf, no -0; the code of -0 is the one NaN
};

// float and double seen as bits.
template <class T> struct native;
template <> struct native<float> {
    using uint = std::uint32_t;
    static constexpr int mant = 23, bias = 127;
};
template <> struct native<double> {
    using uint = std::uint64_t;
    static constexpr int mant = 52, bias = 1023;
};

template <int ExpBits, int MantBits, int Bias, flavour Flavour> struct small_float {
    static_assert(ExpBits + MantBits == 7 || ExpBits + MantBits == 15);
    using storage = std::conditional_t<ExpBits + MantBits == 7, std::uint8_t, std::uint16_t>;

    // Codes are handled as unsigned: no surprises from promotion to int.
    static constexpr unsigned sign_bit = 1u << (ExpBits + MantBits);
    static constexpr unsigned mag_mask = sign_bit - 1;
    static constexpr unsigned exp_ones = mag_mask >> MantBits << MantBits;  // ieee Inf
    static constexpr unsigned quiet_bit = 1u << (MantBits - 1);
    static constexpr unsigned max_finite = Flavour == flavour::ieee ? exp_ones - 1
                                           : Flavour == flavour::fn ? mag_mask - 1
                                                                    : mag_mask;

    template <class T> static constexpr T decode(storage code) {
        using N = native<T>;
        using U = typename N::uint;
        constexpr U hidden = U{1} << N::mant;
        constexpr U inf = U(2 * N::bias + 1) << N::mant;
        // The source's bias must fit inside the target's, or values would be lost.
        static_assert(Bias <= N::bias && MantBits < N::mant);

        const U sign = U((code & sign_bit) != 0) << (8 * sizeof(U) - 1);
        const unsigned mag = code & mag_mask;
        U m = U(mag & ((1u << MantBits) - 1)) << (N::mant - MantBits);

        if (Flavour == flavour::fnuz && code == sign_bit)  // unsigned NaN: give the canonical one
            return std::bit_cast<T>(inf | hidden >> 1);
        if (Flavour == flavour::fn && mag == mag_mask)
            return std::bit_cast<T>(sign | inf | hidden >> 1);
        if (Flavour == flavour::ieee && mag >= exp_ones)  // Inf, or NaN quieted with its payload
            return std::bit_cast<T>(sign | inf | m | (m ? hidden >> 1 : 0));

        int e = int(mag >> MantBits);
        if constexpr (Bias == N::bias) {
            // Same exponent range (bf16 and float): subnormals stay subnormal.
            return std::bit_cast<T>(sign | U(e) << N::mant | m);
        } else {
            if (e == 0) {
                if (m == 0) return std::bit_cast<T>(sign);
                // Subnormal here, normal in T: shift the leading one up to the hidden bit.
                const int up = N::mant + 1 - int(std::bit_width(m));
                m = (m << up) & (hidden - 1);
                e = 1 - up;
            }
            return std::bit_cast<T>(sign | U(e - Bias + N::bias) << N::mant | m);
        }
    }

    template <class T> static constexpr storage encode(T x, bool saturate) {
        using N = native<T>;
        using U = typename N::uint;
        constexpr U hidden = U{1} << N::mant;
        constexpr U inf = U(2 * N::bias + 1) << N::mant;
        static_assert(Bias <= N::bias && MantBits < N::mant);

        const U bits = std::bit_cast<U>(x);
        const unsigned sign = (bits >> (8 * sizeof(U) - 1)) ? sign_bit : 0;
        const U mag = bits << 1 >> 1;

        if (mag > inf) {
            if (Flavour == flavour::fnuz) return storage(sign_bit);
            if (Flavour == flavour::fn) return storage(sign | mag_mask);
            // Keep the payload's top bits as the hardware does. The quiet bit also
            // stops a payload that is cut to zero from turning into Inf.
            const unsigned payload = unsigned((mag & (hidden - 1)) >> (N::mant - MantBits));
            return storage(sign | exp_ones | quiet_bit | payload);
        }
        // Inf goes the way of finite values: its exponent is out of range for every format.

        // |x| = m * 2^(e - N::bias - N::mant); subnormals have e = 1 and no hidden bit.
        int e = int(mag >> N::mant);
        U m = mag & (hidden - 1);
        if (e == 0)
            e = 1;
        else
            m |= hidden;

        // Exponent in the target; below 1 the mantissa is shifted out further to
        // stand on the fixed subnormal grid. Past mant + 2 everything is below a
        // quarter of the last place, so the cap changes nothing.
        int te = e - N::bias + Bias;
        int shift = N::mant - MantBits;
        if (te < 1) {
            shift += 1 - te;
            if (shift > N::mant + 2) shift = N::mant + 2;
            te = 1;
        }
        const U rest = m & ((U{1} << shift) - 1);
        const U half = U{1} << (shift - 1);
        U code = m >> shift;
        code += rest > half || (rest == half && (code & 1));
        // Adding rather than or-ing lets the hidden bit and a rounding carry move
        // into the exponent by themselves. The code may then pass the last finite
        // one: that *is* the overflow test, ties to even included (464 is 448 in
        // e4m3fn, whose 448 has an even code; 61440 overflows in e5m2).
        code += U(te - 1) << MantBits;
        if (code > max_finite) return overflow(sign, saturate);
        if (Flavour == flavour::fnuz && code == 0) return 0;  // -0 would be NaN
        return storage(sign | unsigned(code));
    }

private:
    static constexpr storage overflow(unsigned sign, bool saturate) {
        if (saturate) return storage(sign | max_finite);
        if (Flavour == flavour::ieee) return storage(sign | exp_ones);
        if (Flavour == flavour::fn) return storage(sign | mag_mask);
        return storage(sign_bit);
    }
};

using f16_format = small_float<5, 10, 15, flavour::ieee>;
using bf16_format = small_float<8, 7, 127, flavour::ieee>;
using e4m3fn_format = small_float<4, 3, 7, flavour::fn>;
using e5m2_format = small_float<5, 2, 15, flavour::ieee>;
using e4m3fnuz_format = small_float<4, 3, 8, flavour::fnuz>;
using e5m2fnuz_format = small_float<5, 2, 16, flavour::fnuz>;

}  // namespace detail

// 16-bit formats: overflow gives Inf, as IEEE has it. A NaN stays a NaN: made
// quiet, sign and leading payload bits kept.
constexpr float f16_to_f32(std::uint16_t c) { return detail::f16_format::decode<float>(c); }
constexpr double f16_to_f64(std::uint16_t c) { return detail::f16_format::decode<double>(c); }
constexpr std::uint16_t f32_to_f16(float x) { return detail::f16_format::encode(x, false); }
constexpr std::uint16_t f64_to_f16(double x) { return detail::f16_format::encode(x, false); }

constexpr float bf16_to_f32(std::uint16_t c) { return detail::bf16_format::decode<float>(c); }
constexpr double bf16_to_f64(std::uint16_t c) { return detail::bf16_format::decode<double>(c); }
constexpr std::uint16_t f32_to_bf16(float x) { return detail::bf16_format::encode(x, false); }
constexpr std::uint16_t f64_to_bf16(double x) { return detail::bf16_format::encode(x, false); }

// The machine's own conversion (round to nearest even in the default mode).
constexpr float f64_to_f32(double x) { return static_cast<float>(x); }

// 8-bit formats. saturate = true: overflow and Inf become the largest finite value
// of that sign. saturate = false: they become Inf where the format has one (e5m2),
// else NaN; this is what ml_dtypes does. NaN is NaN either way, with its sign where
// the format has two of them (e4m3fn: 0x7F and 0xFF).
constexpr float e4m3fn_to_f32(std::uint8_t c) { return detail::e4m3fn_format::decode<float>(c); }
constexpr float e5m2_to_f32(std::uint8_t c) { return detail::e5m2_format::decode<float>(c); }
constexpr float e4m3fnuz_to_f32(std::uint8_t c) { return detail::e4m3fnuz_format::decode<float>(c); }
constexpr float e5m2fnuz_to_f32(std::uint8_t c) { return detail::e5m2fnuz_format::decode<float>(c); }

constexpr std::uint8_t f32_to_e4m3fn(float x, bool saturate = true) {
    return detail::e4m3fn_format::encode(x, saturate);
}
constexpr std::uint8_t f32_to_e5m2(float x, bool saturate = true) {
    return detail::e5m2_format::encode(x, saturate);
}
constexpr std::uint8_t f32_to_e4m3fnuz(float x, bool saturate = true) {
    return detail::e4m3fnuz_format::encode(x, saturate);
}
constexpr std::uint8_t f32_to_e5m2fnuz(float x, bool saturate = true) {
    return detail::e5m2fnuz_format::encode(x, saturate);
}

// e8m0fnu: the power of two 2^(code - 127), code 0..254; 0xFF is NaN. No sign, no zero.
constexpr float e8m0fnu_to_f32(std::uint8_t c) {
    if (c == 0xFF) return std::bit_cast<float>(0x7FC00000u);
    if (c == 0) return std::bit_cast<float>(0x00400000u);  // 2^-127 is subnormal in float
    return std::bit_cast<float>(std::uint32_t{c} << 23);
}

namespace detail {
// up: to the next power of two; else to the nearest, a tie (1.5 * 2^k) going up.
constexpr std::uint8_t encode_e8m0fnu(float x, bool up) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    if (bits << 1 == 0) return 0;           // +-0: the smallest scale (an all-zero block)
    if (bits >= 0x7F800000u) return 0xFF;   // NaN, +Inf, anything negative: no such scale
    // Below the first normal the grid is not float's exponent any more: the
    // candidates are 2^-127 (0x00400000) and 2^-126 (0x00800000).
    if (bits < 0x00800000u) return bits > 0x00400000u && (up || bits >= 0x00600000u);
    const std::uint32_t frac = bits & 0x7FFFFFu;
    const bool inc = up ? frac != 0 : frac >= 0x400000u;
    const std::uint32_t code = (bits >> 23) + inc;
    return std::uint8_t(code > 0xFE ? 0xFE : code);  // finite: saturate at 2^127
}
}  // namespace detail

// MX block scales round UP (ceil) to the next power of two, so that dividing the block
// by its scale never leaves the element's range. Zero and everything below 2^-127 give
// 2^-127; finite values above 2^127 give 2^127; Inf, NaN and negatives give NaN, so that a
// poisoned block stays visible.
constexpr std::uint8_t f32_to_e8m0fnu(float x) { return detail::encode_e8m0fnu(x, true); }

// The same, to the nearest power of two, ties up. ml_dtypes 0.6 agrees, except that it
// gives NaN for zero and for finite values from 1.5 * 2^127, and rounds everything
// between 2^-127 and 2^-126 up.
constexpr std::uint8_t f32_to_e8m0fnu_nearest(float x) { return detail::encode_e8m0fnu(x, false); }

}  // namespace cqsa
