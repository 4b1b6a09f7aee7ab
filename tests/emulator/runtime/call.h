// SPDX-License-Identifier: Apache-2.0
// Calls a kernel with arguments as cuLaunchKernel gets them: a pointer to each.
#pragma once
#include <utility>

template <typename... T, size_t... I>
inline void call_with(void (*kernel)(T...), void **arguments, std::index_sequence<I...>) {
  kernel(*(T *)arguments[I]...);
}
template <typename... T>
inline void call(void (*kernel)(T...), void **arguments) {
  call_with(kernel, arguments, std::index_sequence_for<T...>());
}
template <typename... T>
inline bool sizes_of(void (*)(T...), int *sizes) {
  ((*sizes++ = sizeof(T)), ...);
  return true;
}
