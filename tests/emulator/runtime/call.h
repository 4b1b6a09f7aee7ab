// SPDX-License-Identifier: Apache-2.0
// Calls a kernel with arguments as cuLaunchKernel gets them: a pointer to each.
#pragma once

// 0, 1, ... N - 1, as the C++ library's index_sequence.
template <size_t... I>
struct Numbers {};
template <size_t N, size_t... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <size_t... I>
struct Count<0, I...> {
  typedef Numbers<I...> type;
};

template <typename... T, size_t... I>
inline void call_with(void (*kernel)(T...), void **arguments, Numbers<I...>) {
  kernel(*(T *)arguments[I]...);
}
template <typename... T>
inline void call(void (*kernel)(T...), void **arguments) {
  call_with(kernel, arguments, typename Count<sizeof...(T)>::type());
}
template <typename... T>
inline bool sizes_of(void (*)(T...), int *sizes) {
  ((*sizes++ = sizeof(T)), ...);
  return true;
}
