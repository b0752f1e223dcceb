// SPDX-License-Identifier: Apache-2.0
// Every tensor of cqsa_attention_args, with its name in messages.
#pragma once
#include "cqsa.h"

namespace cqsa {

struct operand_name {
  const cqsa_tensor* cqsa_attention_args::*tensor;
  const char* name;
};

inline constexpr operand_name operand_names[] = {
    {&cqsa_attention_args::q, "args->q"},
    {&cqsa_attention_args::k, "args->k"},
    {&cqsa_attention_args::v, "args->v"},
    {&cqsa_attention_args::out, "args->out"},
    {&cqsa_attention_args::lse, "args->lse"},
    {&cqsa_attention_args::k_scale, "args->k_scale"},
    {&cqsa_attention_args::v_scale, "args->v_scale"},
    {&cqsa_attention_args::mask, "args->mask"},
    {&cqsa_attention_args::bias, "args->bias"},
    {&cqsa_attention_args::alibi_slopes, "args->alibi_slopes"},
    {&cqsa_attention_args::sinks, "args->sinks"},
    {&cqsa_attention_args::cu_seqlens_q, "args->cu_seqlens_q"},
    {&cqsa_attention_args::cu_seqlens_k, "args->cu_seqlens_k"},
    {&cqsa_attention_args::seqused_k, "args->seqused_k"},
    {&cqsa_attention_args::page_table, "args->page_table"},
};

}  // namespace cqsa
