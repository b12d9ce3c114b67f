import { mount } from 'svelte'
import App from './App.svelte'
import './app.css'

const target = document.getElementById('page')
if (target === null) throw new Error('index.html has no #page')
mount(App, { target })
